"""One request on the host: its tokens, its text, and where it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tandem.engine.detokenize import DecoderState, StopScanner
from tandem.engine.grammar import GrammarMatcher, MaskArray
from tandem.engine.outputs import Delta, FinishReason, RequestOutput, Timings, TokenLogprobs
from tandem.engine.params import SamplingParams
from tandem.engine.speculation import NO_ROUNDS, RoundCounts
from tandem.engine.tokenizer import Tokenizer

Sink = Callable[[Delta], None]


@dataclass(frozen=True)
class Taken:
    """What a round of tokens does to a request: how many of them it keeps, and whether the last of these ends it.

    Where it ``failed``, nothing is kept.
    """

    num_tokens: int
    stops: bool
    stop_reason: str | int | None
    failed: bool = False


@dataclass(frozen=True)
class _TextState:
    decoder: DecoderState
    text: str
    cut: int | None


class Request:
    """The state of one request. Made by the submitting thread, then touched by the engine thread alone.

    Args:
        request_id: the engine's number for it.
        prompt: the prompt's text, None if it came as ids.
        prompt_ids: the prompt's ids.
        params: checked sampling parameters.
        seed: the noise key, drawn where the parameters have none.
        max_tokens: most tokens to generate, resolved.
        end_ids: ids that end the request.
        tokenizer: None generates no text.
        sink: called on the engine thread with each delta; the last one holds the output.
        stream: whether deltas before the last are wanted.
        grammar: what the text follows, at its start; None leaves the text free.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        end_ids: Collection[int],
        tokenizer: Tokenizer | None,
        sink: Sink,
        stream: bool,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.end_ids = frozenset(end_ids)
        self.output_ids: list[int] = []
        self.stream = stream
        self.seq_id = -1
        self.grammar = grammar
        self._num_matched = 0  # tokens of the round taken last that the grammar has seen
        self._drafts: list[int] = []
        self._sink = sink
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_ids)
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.decoder(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop_strings)
        self._cut: int | None = None
        self._shown = 0
        self._submitted = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None

    @property
    def known_ids(self) -> list[int]:
        """The prompt's ids and those generated so far."""
        return self.prompt_ids + self.output_ids

    def mark_scheduled(self) -> None:
        """A step runs a part of the prompt."""
        if self._scheduled is None:
            self._scheduled = time.perf_counter() - self._submitted

    def grammar_masks(self, num_drafts: int) -> MaskArray:
        """What the grammar allows at each position of the next round, as `GrammarMatcher.masks` gives it."""
        assert self.grammar is not None
        return self.grammar.masks(self._drafts[:num_drafts])

    def take(self, tokens: Sequence[int]) -> Taken:
        """Read a round of sampled tokens up to the one that ends the request.

        Changes only the text; `settle` makes it final or takes it back. What raises changes nothing.
        """
        self._saved = self._save()
        self._num_matched = 0
        try:
            return self._read(tokens)
        except BaseException:
            self._restore()
            raise

    def _read(self, tokens: Sequence[int]) -> Taken:
        for count, token in enumerate(tokens, start=1):
            may_stop = len(self.output_ids) + count > self.params.min_tokens
            if token in self.end_ids and may_stop:
                if self.params.include_stop_str_in_output:
                    self._feed(token, may_stop=False)
                return Taken(count, True, token)
            stop = self._feed(token, may_stop=may_stop)
            if stop is not None:
                return Taken(count, True, stop)
            if self.grammar is not None and self.grammar.complete:
                return Taken(count, True, None)
        return Taken(len(tokens), False, None)

    def _feed(self, token: int, *, may_stop: bool) -> str | None:
        """Take one token into the text; the stop string that it completes, if any."""
        if self.grammar is not None:
            self.grammar.advance(token)
            self._num_matched += 1
        if self._decoder is None:
            return None
        match = self._scanner.feed(self._decoder.feed(token), may_stop=may_stop)
        if match is None:
            return None
        self._cut = match.cut + (len(match.stop) if self.params.include_stop_str_in_output else 0)
        return match.stop

    def _save(self) -> _TextState | None:
        if self._decoder is None:
            return None
        return _TextState(self._decoder.save(), self._scanner.text, self._cut)

    def _restore(self) -> None:
        if self.grammar is not None:
            self.grammar.rollback(self._num_matched)
        if self._decoder is not None and self._saved is not None:
            self._decoder.restore(self._saved.decoder)
            self._scanner.text, self._cut = self._saved.text, self._saved.cut

    def settle(
        self,
        tokens: Sequence[int],
        taken: Taken,
        num_kept: int,
        logprobs: Sequence[TokenLogprobs] | None,
        drafts: Sequence[int] = (),
    ) -> None:
        """Make the first ``num_kept`` tokens of the round that was taken last final; with 0 the round is forgotten.

        ``drafts`` are those of the next round, where the request has a grammar.
        """
        self._drafts = list(drafts)
        if num_kept < taken.num_tokens:
            self._restore()
            for token in tokens[:num_kept]:
                self._feed(token, may_stop=False)
        elif taken.stops:
            self._stop_reason = taken.stop_reason
        self.output_ids.extend(tokens[:num_kept])
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs[:num_kept])
        if num_kept > 0 and self._first_token is None:
            self._first_token = time.perf_counter() - self._submitted

    def set_prompt_logprobs(self, first_index: int, entries: Sequence[TokenLogprobs]) -> None:
        """The entries of the prompt tokens from ``first_index`` on."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[first_index : first_index + len(entries)] = entries

    def fail(self, message: str) -> None:
        """Note what went wrong; the first message stays."""
        self._error = self._error or message

    def emit(self, num_new: int) -> None:
        """Send what the last ``num_new`` tokens add, as far as no later token can change it."""
        if not self.stream:
            return
        text = self._scanner.text[self._shown : self._scanner.safe_length()]
        self._shown += len(text)
        self._sink(Delta(self.request_id, text, self._last(num_new), self._last_logprobs(num_new)))

    def finish(
        self,
        reason: FinishReason,
        *,
        num_new: int,
        cached_tokens: int,
        num_preemptions: int,
        rounds: RoundCounts = NO_ROUNDS,
    ) -> None:
        """Send the end: text held back until now, and the whole output."""
        text = self._scanner.text if self._cut is None else self._scanner.text[: self._cut]
        timings = Timings(self._scheduled, self._first_token, time.perf_counter() - self._submitted)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            text=text,
            token_ids=self.output_ids,
            cached_tokens=cached_tokens,
            finish_reason=reason,
            stop_reason=self._stop_reason,
            error=self._error,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            num_preemptions=num_preemptions,
            rounds=rounds,
            timings=timings,
        )
        self._sink(
            Delta(self.request_id, text[self._shown :], self._last(num_new), self._last_logprobs(num_new), output)
        )

    def _last(self, count: int) -> list[int]:
        return self.output_ids[len(self.output_ids) - count :]

    def _last_logprobs(self, count: int) -> list[TokenLogprobs] | None:
        return None if self._logprobs is None else self._logprobs[len(self._logprobs) - count :]
