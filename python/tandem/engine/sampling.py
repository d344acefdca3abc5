"""Choosing tokens: a pure function of logits, per-position parameters, token index and penalty counts.

A *position* is one row of logits together with the sequence it belongs to and the index of the token it decides. A
sequence may own several positions of one call (the verify rows of a speculative round); nothing here is per sequence.

The order of processing: penalties, logit bias, min-tokens mask, grammar mask, temperature, top-k, top-p, min-p; then
the argmax of the processed logits plus the noise of `tandem.engine.noise` (greedy positions take the argmax alone).
Each stage leaves a position that does not use it bit for bit as it was, so a position's token does not depend on its
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from tandem.engine.noise import gumbel_noise


class SampleError(IntEnum):
    """Why a position has no token."""

    NONE = 0
    NOT_FINITE = 1
    NOTHING_ALLOWED = 2


@dataclass(frozen=True)
class Adjustments:
    """Additive changes of single logits: logit bias and the min-tokens mask (-inf below an index).

    ``position`` int64 ``[M]``, ``token_id`` int64 ``[M]``, ``value`` fp32 ``[M]``, and ``below`` int64 ``[M]``: the
    change applies while the position's token index is less than ``below``.
    """

    position: Tensor
    token_id: Tensor
    value: Tensor
    below: Tensor


@dataclass(frozen=True)
class Penalties:
    """What the penalties of P positions need.

    ``prompt_seen`` bool ``[P, V]``: ids in the prompt. ``counts`` int32 ``[P, V]``: occurrences among the tokens
    generated before the position. ``preceding`` int64 ``[P, D]``: the drafts of the position's own round that stand
    before it, -1 where there is none; they are counted as if they had been accepted. ``repetition``, ``presence``,
    ``frequency`` fp32 ``[P]``.
    """

    prompt_seen: Tensor
    counts: Tensor
    preceding: Tensor | None
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class Truncation:
    """Of P positions: ``top_k`` int64 ``[P]`` (V or more keeps all), ``top_p`` and ``min_p`` fp32 ``[P]``."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True)
class Choice:
    """How P positions are decided. None for a stage means that no position uses it.

    ``temperature`` fp32 ``[P]`` (0 is greedy) and ``seed`` int64 ``[P]``; both None when all positions are greedy.
    ``allowed`` bool ``[P, V]``: what the positions' grammars allow.
    """

    temperature: Tensor | None
    seed: Tensor | None
    penalties: Penalties | None
    adjustments: Adjustments | None
    truncation: Truncation | None
    allowed: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """``tokens`` int64 ``[P]`` and ``errors`` int64 ``[P]`` (`SampleError`); a position with an error has token 0."""

    tokens: Tensor
    errors: Tensor


@dataclass(frozen=True)
class Logprobs:
    """Log-softmax of raw logits: ``chosen`` fp32 ``[P]``; the n best, ``top_values`` and ``top_ids`` ``[P, n]``."""

    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor


def greedy(logits: Tensor) -> Sampled:
    """The argmax of each row of ``logits`` fp32 ``[P, V]``; of equal logits the lowest id."""
    best, tokens = logits.max(dim=-1)
    bad = ~torch.isfinite(best)
    return Sampled(tokens.masked_fill_(bad, 0), bad.to(torch.int64))


def sample(logits: Tensor, token_index: Tensor, choice: Choice) -> Sampled:
    """Decide each position.

    Args:
        logits: fp32 ``[P, V]``, raw; not changed.
        token_index: int64 ``[P]``, the index of the token that the position decides.
        choice: the positions' parameters.
    """
    finite = torch.isfinite(logits.amax(dim=-1))
    scores = logits
    if choice.penalties is not None:
        scores = penalise(scores, choice.penalties)
    if choice.adjustments is not None:
        scores = adjust(scores, token_index, choice.adjustments)
    if choice.allowed is not None:
        scores = scores.masked_fill(~choice.allowed, float("-inf"))
    allowed = scores.amax(dim=-1) > float("-inf")
    if choice.temperature is not None and choice.seed is not None:
        scores = _with_noise(scores, token_index, choice.temperature, choice.seed, choice.truncation)
    tokens = scores.argmax(dim=-1)
    errors = torch.where(finite, torch.where(allowed, 0, int(SampleError.NOTHING_ALLOWED)), int(SampleError.NOT_FINITE))
    return Sampled(tokens.masked_fill(errors != 0, 0), errors)


def _with_noise(
    scores: Tensor, token_index: Tensor, temperature: Tensor, seed: Tensor, truncation: Truncation | None
) -> Tensor:
    """Temperature, truncation and noise for the positions that are not greedy."""
    noisy = temperature > 0.0
    # Shifting by the maximum first keeps tiny temperatures finite: the best logit becomes 0, never an overflow.
    shifted = scores - scores.amax(dim=-1, keepdim=True)
    scaled = shifted / torch.where(noisy, temperature, 1.0)[:, None]
    if truncation is not None:
        scaled = truncate(scaled, truncation)
    scaled = scaled + gumbel_noise(seed, token_index, scores.shape[-1])
    return torch.where(noisy[:, None], scaled, scores)


def penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition, presence and frequency penalties; ``logits`` fp32 ``[P, V]`` -> a new tensor of that shape.

    Repetition (Keskar et al., CTRL, 2019, in the two-sided form): ids of the prompt or the text so far have positive
    logits divided and negative ones multiplied. Presence and frequency look at the generated text only.
    """
    counts = penalties.counts
    if penalties.preceding is not None:
        drafts = penalties.preceding
        counts = counts.scatter_add(1, drafts.clamp(min=0), (drafts >= 0).to(counts.dtype))
    generated = counts > 0
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores = torch.where(penalties.prompt_seen | generated, repeated, logits)
    scores = scores - penalties.frequency[:, None] * counts
    return scores - penalties.presence[:, None] * generated


def adjust(logits: Tensor, token_index: Tensor, adjustments: Adjustments) -> Tensor:
    """Add the adjustments that apply at each position's token index; returns a new tensor."""
    active = token_index[adjustments.position] < adjustments.below
    values = torch.where(active, adjustments.value, 0.0)
    return logits.index_put((adjustments.position, adjustments.token_id), values, accumulate=True)


def truncate(logits: Tensor, truncation: Truncation) -> Tensor:
    """Mask what top-k, then top-p of the remaining ones, then min-p drop; ``logits`` fp32 ``[P, V]`` after temperature.

    Sorting is stable, so of equal logits the lower ids are kept. The most likely token is always kept.
    """
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[-1], device=values.device)
    keep = rank < truncation.top_k[:, None]
    probabilities = torch.softmax(values.masked_fill(~keep, float("-inf")), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = truncation.top_p[:, None]
    # The running sum of fp32 reaches 1 before the last token, so top_p = 1 must not look at it.
    keep &= (before < top_p) | (top_p >= 1.0) | (rank == 0)
    keep &= probabilities >= truncation.min_p[:, None] * probabilities[:, :1]
    dropped = torch.zeros_like(keep).scatter_(1, ids, ~keep)
    return logits.masked_fill(dropped, float("-inf"))


def gather_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities, under raw ``logits`` fp32 ``[P, V]``, of ``tokens`` int64 ``[P]`` and the ``num_top`` best."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, tokens[:, None]).squeeze(1)
    top_values, top_ids = values.topk(min(num_top, values.shape[-1]), dim=-1)
    return Logprobs(chosen, top_values, top_ids)
