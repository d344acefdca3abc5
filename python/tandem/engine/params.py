"""Sampling parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tandem.engine.errors import InvalidParameterError, check_token_ids
from tandem.engine.grammar import Grammar

MAX_LOGPROBS = 20
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Immutable and checked when made.

    The next token is the argmax of the processed logits plus Gumbel noise keyed by (seed, token index, vocabulary id);
    at ``temperature`` 0 the noise is left out (greedy). Logits are processed in fp32 in this order: penalties, logit
    bias, min-tokens mask, temperature, top-k, top-p, min-p. The same request with the same seed gives the same tokens
    whatever runs beside it.

    Attributes:
        temperature: Divides the logits; 0 is greedy. In [0, 1e6]: what comes out has to be finite in fp32.
        top_k: Keep the ``top_k`` highest logits (ties: lower id first); 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches ``top_p``; in (0, 1].
        min_p: Drop tokens less likely than ``min_p`` times the most likely one; in [0, 1].
        repetition_penalty: Divides the positive and multiplies the negative logits of every token that the prompt or
            the text so far holds; in [1e-6, 1e6], 1 is off.
        presence_penalty: Subtracted once from the logit of each token generated so far; in [-2, 2].
        frequency_penalty: Subtracted once per occurrence among the tokens generated so far; in [-2, 2].
        logit_bias: Added to the logits of the given ids, in [-100, 100]; ``-inf`` forbids an id.
        seed: Key of the noise, 0 to 2**64-1; None draws one when the request is submitted.
        logprobs: With n, each token comes with its log-probability and those of the n most likely ones (0 to 20); they
            are the log-softmax of the raw logits, before any processing. None returns none.
        prompt_logprobs: The same for the tokens of the prompt (the first has none). Such a request does not reuse
            cached pages, since the logits of a cached token do not exist.
        stop: Strings that end the text. They are looked for in the whole generated text, reasoning included. The text
            is cut where the string starts; token ids, logprobs and counts end with the token that completed it.
        stop_token_ids: Ids that end the request beside the model's own end tokens.
        include_stop_str_in_output: Keep the stop string (or the text of the stop token) in the text.
        ignore_eos: The model's own end tokens do not end the request.
        min_tokens: Before so many tokens are generated, end and stop ids have probability 0 and no stop string ends the
            text.
        max_tokens: At most so many tokens; None means up to the model's limit.
        detokenize: Without it, ``text`` stays empty and nothing is decoded (needs ``stop`` to be empty).
        skip_special_tokens: Leave control tokens out of the text. The tags around a reply's reasoning are text.
        grammar: What the text must follow, if anything. Its end ends the request, with ``ignore_eos`` too.
        priority: Lower runs first; equal priorities in order of arrival.
        speculate: Without it no drafts are proposed for this request, where the engine has a drafter. Its text is the
            same either way.
        cache_salt: Prefix-cache namespace: pages are shared only between requests of the same salt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    detokenize: bool = True
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    priority: int = 0
    speculate: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _real("temperature", self.temperature, 0.0, 1e6, "a number in [0, 1e6] (0 is greedy)")
        _integer("top_k", self.top_k, 0, 2**31 - 1, "an integer >= 0 (0 keeps all)")
        _real("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]", low_open=True)
        _real("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "a number in [1e-6, 1e6]")
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number in [-2, 2]")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number in [-2, 2]")
        if self.seed is not None:
            _integer("seed", self.seed, 0, _MAX_SEED, "an integer in [0, 2**64) or None")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}] or None")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "an integer >= 0")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer >= 1 or None")
            if self.min_tokens > self.max_tokens:
                raise InvalidParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _integer("priority", self.priority, -(2**31), 2**31 - 1, "an integer of 32 bits")
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "speculate"):
            flag = self.__dict__[name]
            if not isinstance(flag, bool):
                raise InvalidParameterError(name, flag, "True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidParameterError("grammar", self.grammar, "a Grammar or None")
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidParameterError("cache_salt", self.cache_salt, "a non-empty string or None")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidParameterError(
                "stop", self.stop, "empty when detokenize is False, since stop strings are text"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def greedy(self) -> bool:
        """Whether the noise is left out."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens before them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidTokenIdError` where an id of the parameters lies outside the vocabulary."""
        check_token_ids("logit_bias", list(self.logit_bias), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)


def _integer(name: str, value: object, low: int, high: int, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameterError(name, value, allowed)


def _real(
    name: str,
    value: object,
    low: float,
    high: float,
    allowed: str,
    *,
    low_open: bool = False,
) -> None:
    inside = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not math.isnan(value)
        and (low < value if low_open else low <= value)
        and value <= high
    )
    if not inside:
        raise InvalidParameterError(name, value, allowed)


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidParameterError("logit_bias", bias, "a mapping from token id to a number")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidParameterError("logit_bias", token_id, "integers as token ids")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (-100.0 <= value <= 100.0 or value == -math.inf):
            raise InvalidParameterError(
                "logit_bias", {token_id: value}, "numbers in [-100, 100], or -inf to forbid an id"
            )
        checked[token_id] = float(value)
    return MappingProxyType(checked)


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidParameterError("stop", stop, "a non-empty string, or a sequence of such")
    return tuple(strings)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidParameterError(name, ids, "a sequence of integers")
    return tuple(ids)
