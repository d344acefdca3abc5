"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.engine.speculation import NO_ROUNDS, RoundCounts

FinishReason = Literal["stop", "length", "abort", "error"]

LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability and those of the most likely ids at its place, best first.

    Log-probabilities of minus infinity are given as -9999, so that every value is a number in JSON.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was submitted; None for what it never reached."""

    scheduled: float | None
    """Until the first step that ran a part of the prompt."""
    first_token: float | None
    """Until the first token was known."""
    total: float
    """Until the request ended."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: the engine's own number; unique for its life.
        prompt: the prompt's text, None if it was given as ids.
        prompt_token_ids: the prompt's ids.
        text: the generated text: without the stop string, and without a character that the end left incomplete.
        token_ids: the generated ids, the one that ended the request included.
        cached_tokens: prompt tokens whose cache entries were found rather than computed.
        finish_reason: ``stop`` (end token, stop id or stop string), ``length``, ``abort`` or ``error``.
        stop_reason: the stop string or the id that ended the request, for ``stop``.
        error: what went wrong, for ``error``.
        logprobs: one entry per generated token, if asked for.
        prompt_logprobs: one entry per prompt token, None for the first, if asked for.
        num_preemptions: how often the request lost its seat and was resumed.
        rounds: what became of its drafts; all 0 where none were proposed.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    cached_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_preemptions: int = 0
    rounds: RoundCounts = NO_ROUNDS
    timings: Timings = field(default_factory=lambda: Timings(None, None, 0.0))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """Generated tokens, the one that ended the request included."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens after the first over the time since the first; 0 where there is no second token."""
        first = self.timings.first_token
        if first is None or self.completion_tokens < 2:
            return 0.0
        return (self.completion_tokens - 1) / max(self.timings.total - first, 1e-9)


@dataclass(frozen=True)
class Delta:
    """What a request gained in one step. ``text`` may be empty while characters or stop strings are undecided.

    ``output`` is the whole request in its last delta, else None.
    """

    request_id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return None if self.output is None else self.output.finish_reason
