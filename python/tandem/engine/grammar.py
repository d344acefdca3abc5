"""Text that follows a grammar: which ids may come at each position of a round.

The matching is llguidance's: it walks the grammar byte by byte and needs no tables made beforehand. A row with a
grammar is *synchronous*: its masks need the host to know all tokens before them, so it is planned only while it has no
step in flight. A round has one mask for the token after each of its drafts; a draft that the grammar forbids is masked
where it would have to be sampled, so verification rejects it, and the positions after it are dead.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tandem.engine.errors import GrammarError, InvalidParameterError
from tandem.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MaskArray = npt.NDArray[np.int32]

GrammarKind = Literal["json_object", "json_schema", "regex", "grammar"]
_BITS = 32
_EVERYTHING = -1
_NO_DRAFT = -1
# Work that the start of a grammar may take: some 0.3 s. A schema of 5,000 values takes a fifth of it.
_START_FUEL = 250_000
# Requests that share a grammar begin with copies of one start: 0.1 ms, where making it takes milliseconds and more.
_KEPT_STARTS = 16


@dataclass(frozen=True)
class Grammar:
    """What a request's text must follow.

    Attributes:
        kind: ``json_object`` (any object), ``json_schema``, ``regex``, or ``grammar`` (Lark, or GBNF as llama.cpp's).
        source: the schema as JSON text, the regular expression or the grammar; empty for ``json_object``.
        starts_after: a token by its string, e.g. ``</mm:think>``: the text up to it is free and not part of what must
            follow the grammar. None binds the text from its first token.
    """

    kind: GrammarKind
    source: str = ""
    starts_after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidParameterError("grammar", self.kind, f"one of {', '.join(get_args(GrammarKind))}")
        if bool(self.source) == (self.kind == "json_object"):
            allowed = "no source" if self.kind == "json_object" else f"a source for {self.kind}"
            raise InvalidParameterError("grammar", self.source, allowed)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, starts_after: str | None = None) -> Grammar:
        """The JSON texts that a schema allows."""
        return cls("json_schema", json.dumps(schema), starts_after)


class GrammarCompiler:
    """Makes matchers for one vocabulary. Any thread may call it.

    Args:
        tokenizer: the vocabulary.
        vocab_size: V, the width of the logits, at least the tokenizer's own.
        end_ids: ids that end a text whose grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._start_of = functools.lru_cache(_KEPT_STARTS)(self._make_start)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of its text.

        Raises:
            InvalidParameterError: the grammar is malformed or too large, no text fits it, or it starts after something
                that is no token.
        """
        starts_after = None if grammar.starts_after is None else self._tokenizer.token_id(grammar.starts_after)
        if starts_after is None and grammar.starts_after is not None:
            raise InvalidParameterError("starts_after", grammar.starts_after, "a token of the vocabulary")
        start = self._start_of(grammar.kind, grammar.source)
        return GrammarMatcher(start.deep_copy(), starts_after, -(-self._vocab_size // _BITS))

    def _make_start(self, given_kind: GrammarKind, given_source: str) -> llguidance.LLMatcher:
        """The start of a grammar's text; never walked on itself."""
        import llguidance  # only requests with a grammar pay for the import

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._end_ids or None
                )
        kind, source = given_kind, given_source
        if kind == "json_object":
            kind, source = "json_schema", '{"type": "object"}'
        try:
            translated = llguidance.grammar_from(kind, source)
        # A schema must be a JSON object; a GBNF text is translated by code that raises whatever it meets.
        except Exception as error:
            raise InvalidParameterError("grammar", given_source, f"a valid {given_kind} ({error})") from error
        limits = llguidance.LLParserLimits(initial_lexer_fuel=_START_FUEL, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, translated, log_level=0, limits=limits)
        if matcher.is_error() or not self._can_begin(matcher):
            raise InvalidParameterError("grammar", given_source, f"a valid {given_kind} ({_reason(matcher)})")
        return matcher

    def _can_begin(self, matcher: llguidance.LLMatcher) -> bool:
        """Whether a text has a first token. What a large grammar costs is paid here, not by a step of the engine."""
        mask = np.zeros((1, -(-self._vocab_size // _BITS)), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(unpack_masks(mask, self._vocab_size)[0])
        return allowed.size > 0 and matcher.try_consume_tokens([int(allowed[0])]) == 1 and matcher.rollback(1)


class GrammarMatcher:
    """Where one request's text stands in its grammar. The tokens it has seen are those of the text so far.

    Args:
        matcher: at the start of the text.
        starts_after: the id that ends the free part; None where there is none.
        num_words: int32 words of a mask, ceil(V / 32).
    """

    def __init__(self, matcher: llguidance.LLMatcher, starts_after: int | None, num_words: int) -> None:
        self._matcher = matcher
        self._starts_after = starts_after
        self._num_words = num_words
        self._started = starts_after is None
        self._bound: list[bool] = []  # of each token, whether it is part of what follows the grammar

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._started and self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the text's next token.

        Raises:
            GrammarError: the grammar forbids it, or cannot be walked on within its limits.
        """
        if not self._consume(token):
            raise GrammarError(f"the grammar does not allow token {token} here ({_reason(self._matcher)})")

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        if count == 0:
            return
        undone = self._bound[-count:]
        del self._bound[-count:]
        if any(undone):
            self._matcher.rollback(sum(undone))
        self._started = undone[0]

    def masks(self, drafts: Sequence[int]) -> MaskArray:
        """The ids allowed at each position of a round of n drafts, one bit each, lowest first.

        Returns int32 ``[1 + n, ceil(V / 32)]``; row i is for the token after i drafts. Rows after a forbidden draft, or
        after the end, allow everything.
        """
        masks = np.full((1 + len(drafts), self._num_words), _EVERYTHING, dtype=np.int32)
        taken = 0
        for row, draft in zip(masks, [*drafts, _NO_DRAFT], strict=True):
            if self.complete:
                break
            if self._started:
                self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if draft == _NO_DRAFT or not self._consume(draft):
                break
            taken += 1
        self.rollback(taken)
        return masks

    def _consume(self, token: int) -> bool:
        if self._started and self._matcher.try_consume_tokens([token]) == 0:
            return False
        self._bound.append(self._started)
        self._started = self._started or token == self._starts_after
        return True


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher goes no further, in one line."""
    words = [word for word in matcher.get_error().split() if word != "<non-verbose/>"]
    return "no text fits" if words in ([], ["NoExtensionBias"]) else " ".join(words)


def unpack_masks(masks: MaskArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool ``[P, V]`` of masks int32 ``[P, ceil(V / 32)]``."""
    return np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little").astype(np.bool_)
