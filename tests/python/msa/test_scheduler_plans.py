"""Plans of the real scheduler, made ahead of the results they depend on: the device finds every index by itself."""

from collections import deque
from random import Random

import numpy as np
import pytest
import torch

from tandem.core import sched
from tandem.msa import Limits, PlanRows, RowKind, SeatState, StepMetadata, advance, derive

PAGE, DRAFTS = 4, 3
NUM_SLOTS, MAX_LEN = 40, 64


def engine_parts(overlap: bool) -> tuple[sched.Scheduler, Limits]:
    config = sched.SchedulerConfig(
        num_slots=NUM_SLOTS,
        tokens_per_page=PAGE,
        max_seats=4,
        max_tokens_per_step=24,
        max_model_len=MAX_LEN,
        draft_len=DRAFTS,
        has_drafter=True,
        overlap=overlap,
        enable_prefix_cache=True,
    )
    limits = Limits(
        max_seats=4,
        max_tokens=24,
        max_rows=4,
        max_model_len=MAX_LEN,
        tokens_per_page=PAGE,
        max_pages=MAX_LEN // PAGE,
        max_draft_len=DRAFTS,
        num_slots=NUM_SLOTS,
    )
    return sched.Scheduler(config), limits


class Device:
    """Seats as a step leaves them, with acceptance drawn at random, and the true lengths counted beside them."""

    def __init__(self, limits: Limits, rng: Random) -> None:
        self.state, self.meta, self._rng = SeatState(limits), StepMetadata(limits), rng
        self.true_length = [0] * limits.max_seats
        self.num_behind_bound = 0

    def run(self, plan: sched.StepPlan) -> sched.StepResult:
        rows = PlanRows.from_plan(plan)
        derive(rows, self.state, self.meta)
        meta = self.meta
        assert int(meta.overrun) <= 0
        start = 0
        written_entries: set[tuple[int, int]] = set()
        accepted, num_tokens = [], []
        for row in range(rows.num_rows):
            seat, query_len = int(rows.seat[row]), int(rows.query_len[row])
            if rows.fresh[row]:
                self.true_length[seat] = int(rows.first_index[row])
            length = self.true_length[seat]
            self.num_behind_bound += length < int(rows.first_index[row])
            for t in range(query_len):
                index = length + t
                inside = index < int(rows.max_length[row])
                assert int(meta.kv_len[start + t]) == (index + 1 if inside else 0)
                written = inside and index >= int(rows.write_from[row])
                assert int(meta.write_index[start + t]) == (index if written else -1)
                if written:
                    slot = int(self.state.block_table[seat, index // PAGE])
                    assert 0 <= slot < NUM_SLOTS
                    assert (slot, index % PAGE) not in written_entries
                    written_entries.add((slot, index % PAGE))
            start += query_len
            if rows.kind[row] == RowKind.DECODE:
                room = int(rows.max_length[row]) - length - 1
                taken = min(self._rng.randint(0, int(rows.num_drafts[row])), max(room, 0))
                accepted.append(taken)
                num_tokens.append(taken + 1)
                self.true_length[seat] = min(length + taken + 1, int(rows.max_length[row]))
            else:
                self.true_length[seat] += query_len
                if rows.samples[row]:
                    accepted.append(0)
                    num_tokens.append(1)
        newest = torch.full((len(accepted),), 5, dtype=torch.int32)
        advance(self.state, meta, newest, torch.tensor(accepted, dtype=torch.int32))
        tokens = np.full(sum(num_tokens), 5, dtype=np.int32)
        finish = np.zeros(len(accepted), dtype=np.int32)
        return sched.StepResult(
            plan.step_id, np.array(num_tokens, dtype=np.int32), np.array(accepted, dtype=np.int32), tokens, finish
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_indices_follow_the_accepted_drafts_whatever_was_planned_ahead(overlap: bool, seed: int) -> None:
    scheduler, limits = engine_parts(overlap)
    rng = Random(seed)
    device = Device(limits, rng)
    wanted = {}
    for _ in range(12):
        prompt = np.array([rng.randint(0, 9) for _ in range(rng.randint(1, 30))], dtype=np.int32)
        max_tokens = rng.randint(1, 25)
        wanted[scheduler.submit(sched.RequestSpec(prompt=prompt, max_tokens=max_tokens))] = max_tokens
    in_flight: deque[sched.StepResult] = deque()
    generated: dict[int, int] = {}
    for _ in range(2000):
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append(device.run(plan))
        if in_flight and (plan is None or len(in_flight) > int(overlap)):
            events = scheduler.complete(in_flight.popleft())
            for terminal in events.terminals:
                generated[terminal.seq_id] = terminal.num_generated_tokens
        if plan is None and not in_flight:
            break
    assert generated == wanted
    # With a step in flight some rows are planned beyond their true length; without one, none is.
    assert (device.num_behind_bound > 0) == overlap
