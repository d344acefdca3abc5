"""Runs a planned step on the device: derive, forward, sample, verify, advance, draft.

Where steps overlap, they run on a thread of their own, which alone touches the tensors; the engine's thread reads the
requests, hands a step over, and takes its result later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.core import sched
from tandem.engine.grammar import MaskArray
from tandem.engine.outputs import LOWEST_LOGPROB, TokenLogprobs
from tandem.engine.request import Request
from tandem.engine.sampling import Logprobs, Sampled, SampleError, gather_logprobs
from tandem.engine.seats import IntArray, PositionMasks, Positions, RoundDrafts, SamplingSeats
from tandem.engine.step_thread import Pending, StepThread
from tandem.msa import AttentionBackend, Limits, PlanRows, RowKind, SeatState, StepMetadata, advance, derive
from tandem.spec import DraftWorker, Verified, kept_positions, store_drafts, verify

# Rows of prompt logits computed at a time: a whole chunk at M3's vocabulary would be some 400 MB.
_PROMPT_LOGPROB_ROWS = 64
_DECODE = int(RowKind.DECODE)
_ERRORS = tuple(SampleError)


class StepModel(Protocol):
    """What the runner asks of a model; `tandem.models.MiniMaxM3` is one."""

    def forward(
        self, token_ids: Tensor, meta: StepMetadata, attention: AttentionBackend, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """(hidden ``[T, H]``, captured states) of the step's tokens int32 ``[T]``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 ``[N, V]`` of hidden ``[N, H]``."""


@dataclass
class StepTimes:
    """Seconds spent in each part of the steps so far.

    ``plan``, ``launch``, ``wait`` and ``output`` are the engine thread's. ``model``, ``sample`` and ``draft`` are the
    step's own: a part of ``launch``, or beside all of them where steps run on their own thread.
    """

    plan: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    draft: float = 0.0
    output: float = 0.0


@dataclass(frozen=True)
class _Wanted:
    """Positions of the step (indices into its logits) whose log-probabilities are wanted, and how many top ids."""

    positions: IntArray
    num_top: IntArray


@dataclass(frozen=True)
class _FreshSeat:
    """A seat that its row is the first to name, with the tokens generated for its request so far."""

    seat: int
    request: Request
    output_ids: list[int]


@dataclass(frozen=True)
class _Step:
    """A step as the engine's thread hands it over. The plan's arrays are valid until the step's own completion.

    ``sampling_rows`` are the plan's rows that yield tokens; ``masks`` are what grammars allow at the positions of some
    of these, each with its place among them.
    """

    plan: sched.StepPlan
    rows: PlanRows
    requests: list[Request]
    fresh: list[_FreshSeat]
    sampling_rows: IntArray
    masks: list[tuple[int, MaskArray]]


@dataclass(frozen=True)
class RowResult:
    """What one sampling row brought: its tokens, or an error in their place.

    ``drafts`` are those of its next round, given where the row has a grammar.
    """

    tokens: list[int]
    num_accepted: int
    error: SampleError
    logprobs: list[TokenLogprobs] | None
    drafts: list[int]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a request's prompt tokens from ``first_index`` on."""

    request: Request
    first_index: int
    entries: list[TokenLogprobs]


@dataclass(frozen=True)
class StepOutcome:
    """A step's results on the host: one per sampling row in plan order, and what it says of prompts."""

    rows: list[RowResult]
    prompt_logprobs: list[PromptLogprobs]


@dataclass(frozen=True)
class StepInFlight:
    """A launched step; ``requests`` are those of its sampling rows."""

    plan: sched.StepPlan
    requests: list[Request]
    outcome: Pending[StepOutcome]


class ModelRunner:
    """The device side of the engine.

    Args:
        model: the model.
        attention: its cache.
        state: the seats that `attention` reads.
        limits: bounds of the engine.
        vocab_size: V, the width of the logits.
        steps_in_flight: steps launched and not yet collected, at most. With more than one, steps run on a thread of
            their own; with one, `launch` runs them itself.
        draft_worker: proposes drafts, in the cache of `attention`; None where there is no drafter.
        before_step: called with each plan before anything of the step runs.
    """

    def __init__(
        self,
        model: StepModel,
        attention: AttentionBackend,
        state: SeatState,
        limits: Limits,
        vocab_size: int,
        *,
        steps_in_flight: int = 1,
        draft_worker: DraftWorker | None = None,
        before_step: Callable[[sched.StepPlan], None] | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._state = state
        self._meta = StepMetadata(limits, state.device, steps_in_flight)
        self._seats = SamplingSeats(limits.max_seats, vocab_size, state.device)
        self._draft_worker = draft_worker
        self._captured_layers = () if draft_worker is None else draft_worker.captured_layers
        self._before_step = before_step
        self._iota = np.arange(limits.max_tokens + 1, dtype=np.int64)
        self.vocab_size = vocab_size
        self.times = StepTimes()
        self._failed_seats: set[int] = set()
        # Last: a thread is not started for a runner that cannot be made.
        self._thread = StepThread() if steps_in_flight > 1 else None

    def launch(self, plan: sched.StepPlan, requests: Mapping[int, Request]) -> StepInFlight:
        """Start a step; ``requests`` by sequence id. What goes wrong in it is raised by `collect`."""
        rows = PlanRows.from_plan(plan)
        row_requests = [requests[seq_id] for seq_id in plan.seq_id.tolist()]
        fresh = []
        for row in np.flatnonzero(rows.fresh).tolist():
            request = row_requests[row]
            request.mark_scheduled()
            fresh.append(_FreshSeat(int(rows.seat[row]), request, list(request.output_ids)))
        sampling_rows = np.flatnonzero(rows.samples)
        masks = [
            (i, row_requests[row].grammar_masks(int(rows.num_drafts[row])))
            for i, row in enumerate(sampling_rows.tolist())
            if row_requests[row].grammar is not None
        ]
        step = _Step(plan, rows, row_requests, fresh, sampling_rows, masks)
        outcome = Pending(lambda: self._run(step))
        if self._thread is None:
            outcome.run()
        else:
            self._thread.submit(outcome)
        return StepInFlight(plan, [row_requests[row] for row in sampling_rows.tolist()], outcome)

    def collect(self, step: StepInFlight) -> StepOutcome:
        """The outcome of a launched step; waits for it, and raises what it raised."""
        return step.outcome.wait()

    def close(self) -> None:
        """Wait for what was launched, and end the thread. May be called again."""
        if self._thread is not None:
            self._thread.close()

    def _run(self, step: _Step) -> StepOutcome:
        try:
            return self._run_rows(step, self._readable(step.rows))
        except BaseException:
            self._failed_seats.update(step.rows.seat.tolist())
            raise

    def _readable(self, rows: PlanRows) -> PlanRows:
        """The rows, with those that read and write nothing whose sequence was in a step that failed.

        Such a step may have stopped anywhere, before it knew the sequence's pages even, and its rows of later steps
        may have been launched by then. Their results are dropped; a seat is sound again once it has a new owner.
        """
        if not self._failed_seats:
            return rows
        self._failed_seats.difference_update(rows.seat[rows.fresh != 0].tolist())
        failed = np.isin(rows.seat, list(self._failed_seats))
        # No index lies below a limit of 0. A fresh row takes its length from the plan, whatever its seat holds.
        return replace(
            rows,
            max_length=np.where(failed, np.int32(0), rows.max_length),
            fresh=np.where(failed, np.uint8(1), rows.fresh),
        )

    @torch.inference_mode()
    def _run_rows(self, step: _Step, rows: PlanRows) -> StepOutcome:
        start = time.perf_counter()
        for each in step.fresh:
            request = each.request
            self._seats.fill(
                each.seat, request.params, request.seed, request.prompt_ids, each.output_ids, request.end_ids
            )
        if self._before_step is not None:
            self._before_step(step.plan)
        derive(rows, self._state, self._meta)
        meta = self._meta
        hidden, captured = self._model.forward(meta.token_ids, meta, self._attention, self._captured_layers)
        prompt_logprobs = self._prompt_logprobs(rows, step.requests, hidden)
        decides = hidden if meta.num_logits == meta.num_tokens else hidden.index_select(0, meta.logit_token)
        logits = self._model.logits(decides)
        middle = time.perf_counter()
        positions, first_position = self._positions(rows, step.sampling_rows, step.masks)
        sampled = self._seats.decide(logits, positions)
        wanted = _wanted_logprobs([step.requests[row] for row in step.sampling_rows], first_position)
        logprobs = None
        if wanted is not None:
            where = torch.from_numpy(wanted.positions).to(logits.device)
            logprobs = gather_logprobs(logits[where], sampled.tokens[where], int(wanted.num_top.max()))
        tokens = sampled.tokens.to(torch.int32)
        verified = verify(meta, tokens, self._state.drafts)
        # Without drafts each sampling row has one position, and its token is the row's newest.
        verifies = meta.num_logits > meta.num_samples
        kept = partial(kept_positions, meta, verified) if verifies else None
        self._seats.advance(positions.seat, sampled.tokens, kept)
        advance(self._state, meta, verified.newest, verified.num_accepted if verifies else None)
        end = time.perf_counter()
        published: dict[int, list[int]] = {}
        if self._draft_worker is not None:
            proposes = step.plan.proposes[step.sampling_rows]
            proposing = None if proposes.all() else torch.from_numpy(np.flatnonzero(proposes)).to(tokens.device)
            drafts = self._draft_worker.run(meta, tokens, verified, captured, proposing)
            store_drafts(self._state, meta, drafts)
            published = {i: drafts[i].tolist() for i, _ in step.masks}
        drafted = time.perf_counter()
        if (overrun := int(meta.overrun)) > 0:
            raise RuntimeError(f"a sequence is {overrun} tokens longer than the plan of its step allows")
        by_position = _logprobs_by_position(sampled, wanted, logprobs)
        rows_results = _row_results(sampled, verified, first_position, by_position, published)
        self.times.model += middle - start
        self.times.sample += end - middle + time.perf_counter() - drafted
        self.times.draft += drafted - end
        return StepOutcome(rows_results, prompt_logprobs)

    def _positions(
        self, rows: PlanRows, sampling_rows: IntArray, masks: Sequence[tuple[int, MaskArray]]
    ) -> tuple[Positions, IntArray]:
        """The step's positions, and where each sampling row's begin ``[N+1]``."""
        seat = rows.seat[sampling_rows].astype(np.int64)
        if not rows.num_drafts.any():
            first = self._iota[: len(seat) + 1]
            return Positions(seat, self._token_index, None, _position_masks(masks, first)), first
        counts = np.where(rows.kind[sampling_rows] == _DECODE, rows.query_len[sampling_rows], 1).astype(np.int64)
        first = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=first[1:])
        before = self._iota[: first[-1]] - np.repeat(first[:-1], counts)
        row_end = np.cumsum(rows.query_len, dtype=np.int64)[sampling_rows]
        place = np.repeat(row_end - counts, counts) + before
        drafts = RoundDrafts(before, place, self._meta.token_ids)
        return Positions(np.repeat(seat, counts), self._token_index, drafts, _position_masks(masks, first)), first

    def _token_index(self) -> Tensor:
        """The index of the token that each position of the derived step decides, int64 ``[L]``."""
        return self._meta.position.index_select(0, self._meta.logit_token).to(torch.int64) + 1

    def _prompt_logprobs(self, rows: PlanRows, requests: Sequence[Request], hidden: Tensor) -> list[PromptLogprobs]:
        """Log-probabilities of the prompt tokens that follow the tokens of context rows, where wanted."""
        parts: list[PromptLogprobs] = []
        if len(rows.token_ids) == 0:
            return parts
        row_start = np.cumsum(rows.query_len) - rows.query_len
        for row, request in enumerate(requests):
            num_top = request.params.prompt_logprobs
            if num_top is None or rows.kind[row] == _DECODE:
                continue
            first_index = int(rows.first_index[row]) + 1
            count = min(int(rows.query_len[row]), len(request.prompt_ids) - first_index)
            for offset in range(0, count, _PROMPT_LOGPROB_ROWS):
                size = min(_PROMPT_LOGPROB_ROWS, count - offset)
                start = int(row_start[row]) + offset
                index = first_index + offset
                tokens = torch.tensor(request.prompt_ids[index : index + size], device=hidden.device)
                logits = self._model.logits(hidden[start : start + size])
                entries = _entries(tokens, gather_logprobs(logits, tokens, num_top), num_top)
                parts.append(PromptLogprobs(request, index, entries))
        return parts


def _position_masks(masks: Sequence[tuple[int, MaskArray]], first_position: IntArray) -> PositionMasks | None:
    if not masks:
        return None
    place = [first_position[i] + np.arange(len(bits)) for i, bits in masks]
    return PositionMasks(np.concatenate(place), np.concatenate([bits for _, bits in masks]))


def _row_results(
    sampled: Sampled,
    verified: Verified,
    first_position: IntArray,
    logprobs: Mapping[int, TokenLogprobs],
    drafts: Mapping[int, list[int]],
) -> list[RowResult]:
    """One result per sampling row, whose positions begin at ``first_position`` ``[N+1]``; ``drafts`` by row."""
    tokens, errors = sampled.tokens.tolist(), sampled.errors.tolist()
    results = []
    starts = zip(first_position[:-1].tolist(), verified.num_accepted.tolist(), strict=True)
    for i, (first, num_accepted) in enumerate(starts):
        # What follows the first draft that was not accepted is dead, errors included.
        end = first + num_accepted + 1
        error = _ERRORS[max(errors[first:end])]
        row_logprobs = [logprobs[i] for i in range(first, end)] if first in logprobs else None
        results.append(RowResult(tokens[first:end], num_accepted, error, row_logprobs, drafts.get(i, [])))
    return results


def _wanted_logprobs(requests: Sequence[Request], first_position: IntArray) -> _Wanted | None:
    positions: list[int] = []
    num_top: list[int] = []
    for i, request in enumerate(requests):
        if request.params.logprobs is not None:
            mine = range(int(first_position[i]), int(first_position[i + 1]))
            positions.extend(mine)
            num_top.extend([request.params.logprobs] * len(mine))
    if not positions:
        return None
    return _Wanted(np.array(positions, dtype=np.int64), np.array(num_top, dtype=np.int64))


def _logprobs_by_position(
    sampled: Sampled, wanted: _Wanted | None, logprobs: Logprobs | None
) -> dict[int, TokenLogprobs]:
    if wanted is None or logprobs is None:
        return {}
    positions, num_top = wanted.positions.tolist(), wanted.num_top.tolist()
    tokens = sampled.tokens[torch.from_numpy(wanted.positions).to(sampled.tokens.device)]
    entries = _entries(tokens, logprobs, max(num_top))
    return {
        position: TokenLogprobs(entry.token_id, entry.logprob, entry.top[:n])
        for position, n, entry in zip(positions, num_top, entries, strict=True)
    }


def _entries(tokens: Tensor, values: Logprobs, num_top: int) -> list[TokenLogprobs]:
    chosen = values.chosen.nan_to_num(LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB).tolist()
    top_values = values.top_values[:, :num_top].nan_to_num(LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB).tolist()
    top_ids = values.top_ids[:, :num_top].tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, row, strict=True)))
        for token, logprob, ids, row in zip(tokens.tolist(), chosen, top_ids, top_values, strict=True)
    ]
