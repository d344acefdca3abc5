"""What sampling needs of each running sequence, kept by seat, and the step's positions put together from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.grammar import MaskArray, unpack_masks
from tandem.engine.noise import as_signed_seed
from tandem.engine.params import SamplingParams
from tandem.engine.sampling import Adjustments, Choice, Penalties, Sampled, Truncation, greedy, sample

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Stage(IntFlag):
    """Stages of processing that a seat uses."""

    PENALTIES = 1
    ADJUSTMENTS = 2
    TRUNCATION = 4
    NOISE = 8
    GRAMMAR = 16


_PENALTIES, _ADJUSTMENTS, _TRUNCATION, _NOISE, _GRAMMAR = (int(stage) for stage in Stage)


@dataclass(frozen=True)
class _SeatAdjustments:
    token_id: IntArray
    value: FloatArray
    below: IntArray


_ALWAYS = 2**62


@dataclass(frozen=True)
class Positions:
    """The L positions of a step, in the order of its logits.

    ``seat`` int64 ``[L]``, on the host; ``token_index``, called where it is needed, int64 ``[L]``: the index of the
    token to be decided, on the device; ``drafts``: None where no position of the step has drafts before it; ``masks``:
    None where none has a grammar.
    """

    seat: IntArray
    token_index: Callable[[], Tensor]
    drafts: RoundDrafts | None
    masks: PositionMasks | None = None


@dataclass(frozen=True)
class RoundDrafts:
    """Where the drafts before each of L positions stand in their rounds.

    ``count`` int64 ``[L]``: how many stand before it; ``place`` int64 ``[L]``: where in the step's tokens the
    position's own input stands, which is the last of them; both on the host. ``tokens`` int32: the step's tokens, on
    the device.
    """

    count: IntArray
    place: IntArray
    tokens: Tensor


@dataclass(frozen=True)
class PositionMasks:
    """What grammars allow at G of the positions, on the host.

    ``place`` int64 ``[G]``, ascending: which positions; ``bits`` int32 ``[G, ceil(V / 32)]``, an id's bit set where it
    may come.
    """

    place: IntArray
    bits: MaskArray


class SamplingSeats:
    """Sampling parameters by seat, on the host, and penalty counts by seat, on the device.

    A seat is filled when its sequence gets it, from what the request knows then, so a resumed request is rebuilt from
    its token ids. Counts exist only once a request has penalties: ``counts`` int32 ``[S, V]`` of generated ids and
    ``prompt_seen`` bool ``[S, V]``.
    """

    def __init__(self, max_seats: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._stages = np.zeros(max_seats, dtype=np.int64)
        self._temperature = np.zeros(max_seats, dtype=np.float32)
        self._seed = np.zeros(max_seats, dtype=np.int64)
        self._top_k = np.zeros(max_seats, dtype=np.int64)
        self._top_p = np.zeros(max_seats, dtype=np.float32)
        self._min_p = np.zeros(max_seats, dtype=np.float32)
        self._penalties = np.zeros((3, max_seats), dtype=np.float32)
        self._adjustments: list[_SeatAdjustments | None] = [None] * max_seats
        self._counts: Tensor | None = None
        self._prompt_seen: Tensor | None = None

    def fill(
        self,
        seat: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        end_ids: Collection[int],
    ) -> None:
        """Set a seat for a sequence with the given tokens so far."""
        stages = Stage(0)
        self._temperature[seat] = params.temperature
        self._seed[seat] = as_signed_seed(seed)
        if not params.greedy:
            stages |= Stage.NOISE
            self._top_k[seat] = params.top_k or self._vocab_size
            self._top_p[seat] = params.top_p
            self._min_p[seat] = params.min_p
            if params.top_k or params.top_p < 1.0 or params.min_p > 0.0:
                stages |= Stage.TRUNCATION
        self._adjustments[seat] = _adjustments_of(params, len(prompt_ids), end_ids)
        if self._adjustments[seat] is not None:
            stages |= Stage.ADJUSTMENTS
        if params.has_penalties:
            stages |= Stage.PENALTIES
            self._penalties[:, seat] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            self._rebuild_counts(seat, prompt_ids, output_ids)
        if params.grammar is not None:
            stages |= Stage.GRAMMAR
        self._stages[seat] = int(stages)

    def _rebuild_counts(self, seat: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        shape = (len(self._stages), self._vocab_size)
        if self._counts is None or self._prompt_seen is None:
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        generated = torch.as_tensor(output_ids, dtype=torch.int64, device=self._device)
        self._counts[seat] = torch.bincount(generated, minlength=self._vocab_size).to(torch.int32)
        self._prompt_seen[seat] = False
        self._prompt_seen[seat, torch.as_tensor(prompt_ids, dtype=torch.int64, device=self._device)] = True

    def decide(self, logits: Tensor, positions: Positions) -> Sampled:
        """A token for each position; ``logits`` fp32 ``[L, V]`` in the order of ``positions``."""
        sampled = greedy(logits)
        stages = self._stages[positions.seat]
        if not stages.any():
            return sampled
        token_index = positions.token_index()
        noisy = (stages & _NOISE) != 0
        # Greedy positions with other stages are decided apart, so that they never pay for the noise.
        for chosen in (np.flatnonzero(noisy), np.flatnonzero(~noisy & (stages != 0))):
            if len(chosen) == 0:
                continue
            where = self._to_device(chosen)
            part = sample(logits[where], token_index[where], self._choice(chosen, stages[chosen], positions))
            sampled.tokens[where] = part.tokens
            sampled.errors[where] = part.errors
        return sampled

    def advance(self, seats: IntArray, tokens: Tensor, valid: Callable[[], Tensor] | None = None) -> None:
        """Count accepted tokens: int64 ``tokens`` ``[N]`` of ``seats`` ``[N]``.

        Those where ``valid``, called where it is needed, is true, bool ``[N]``; all of them if None.
        """
        if self._counts is None:
            return
        penalised = np.flatnonzero(self._stages[seats] & _PENALTIES)
        if len(penalised) == 0:
            return
        where = self._to_device(penalised)
        ones = torch.ones(len(penalised), dtype=torch.int32, device=self._device)
        added = ones if valid is None else ones * valid()[where]
        self._counts.index_put_((self._to_device(seats[penalised]), tokens[where]), added, accumulate=True)

    def _choice(self, chosen: IntArray, stages: IntArray, positions: Positions) -> Choice:
        seats = positions.seat[chosen]
        noisy = bool(stages[0] & _NOISE)
        used = int(np.bitwise_or.reduce(stages))
        truncation = None
        if used & _TRUNCATION:
            truncation = Truncation(
                self._to_device(self._top_k[seats]),
                self._to_device(self._top_p[seats]),
                self._to_device(self._min_p[seats]),
            )
        return Choice(
            temperature=self._to_device(self._temperature[seats]) if noisy else None,
            seed=self._to_device(self._seed[seats]) if noisy else None,
            penalties=self._position_penalties(chosen, seats, positions) if used & _PENALTIES else None,
            adjustments=self._position_adjustments(seats) if used & _ADJUSTMENTS else None,
            truncation=truncation,
            allowed=self._allowed(chosen, positions.masks) if used & _GRAMMAR else None,
        )

    def _position_penalties(self, chosen: IntArray, seats: IntArray, positions: Positions) -> Penalties:
        assert self._counts is not None
        assert self._prompt_seen is not None
        where = self._to_device(seats)
        # A seat without penalties has neutral factors, whatever its counts are.
        neutral = (self._stages[seats] & _PENALTIES) == 0
        repetition, presence, frequency = self._penalties[:, seats]
        return Penalties(
            prompt_seen=self._prompt_seen[where],
            counts=self._counts[where],
            preceding=self._preceding(chosen, positions.drafts),
            repetition=self._to_device(np.where(neutral, np.float32(1.0), repetition)),
            presence=self._to_device(np.where(neutral, np.float32(0.0), presence)),
            frequency=self._to_device(np.where(neutral, np.float32(0.0), frequency)),
        )

    def _preceding(self, chosen: IntArray, drafts: RoundDrafts | None) -> Tensor | None:
        """The drafts before each chosen position in its round, int64 ``[P, D]``, -1 where there is none."""
        if drafts is None:
            return None
        count, place = drafts.count[chosen], drafts.place[chosen]
        back = np.arange(int(count.max()))
        where = self._to_device(np.where(back < count[:, None], place[:, None] - back, -1))
        tokens = drafts.tokens.to(torch.int64)[where.clamp(min=0)]
        return torch.where(where >= 0, tokens, -1)

    def _position_adjustments(self, seats: IntArray) -> Adjustments:
        parts = [(i, part) for i, seat in enumerate(seats) if (part := self._adjustments[seat]) is not None]
        counts = [len(part.token_id) for _, part in parts]
        return Adjustments(
            position=self._to_device(np.repeat(np.array([i for i, _ in parts], dtype=np.int64), counts)),
            token_id=self._to_device(np.concatenate([part.token_id for _, part in parts])),
            value=self._to_device(np.concatenate([part.value for _, part in parts])),
            below=self._to_device(np.concatenate([part.below for _, part in parts])),
        )

    def _allowed(self, chosen: IntArray, masks: PositionMasks | None) -> Tensor:
        """bool ``[P, V]``; everything is allowed at a position without a grammar."""
        assert masks is not None, "a seat has a grammar and its positions have no masks"
        allowed = np.ones((len(chosen), self._vocab_size), dtype=np.bool_)
        _, mine, theirs = np.intersect1d(chosen, masks.place, assume_unique=True, return_indices=True)
        allowed[mine] = unpack_masks(masks.bits[theirs], self._vocab_size)
        return self._to_device(allowed)

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _adjustments_of(params: SamplingParams, prompt_len: int, end_ids: Collection[int]) -> _SeatAdjustments | None:
    """Logit bias everywhere; end ids forbidden below the index of the first token that may end the request."""
    masked = sorted(end_ids) if params.min_tokens > 0 else []
    ids = [*params.logit_bias, *masked]
    if not ids:
        return None
    values = [*params.logit_bias.values(), *[-np.inf] * len(masked)]
    below = [_ALWAYS] * len(params.logit_bias) + [prompt_len + params.min_tokens] * len(masked)
    return _SeatAdjustments(
        np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32), np.array(below, dtype=np.int64)
    )
