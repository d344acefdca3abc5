"""Where draft slots lie: one index above the token whose hidden state they take."""

import random
from collections.abc import Callable

import pytest
import torch

from tandem.core import InvalidArgument
from tandem.msa import Limits, SeatState, StepMetadata, derive
from tandem.spec.slots import (
    DraftSlots,
    extend_slots,
    extend_slots_in_torch,
    extend_token_ids,
    single_slots,
    single_slots_in_torch,
)
from tests.python.msa.plans import context, decode, plan, random_rows

LIMITS = Limits(
    max_seats=5,
    max_tokens=64,
    max_rows=8,
    max_model_len=48,
    tokens_per_page=8,
    max_pages=6,
    max_draft_len=3,
    num_slots=30,
)


ExtendSlots = Callable[[StepMetadata], DraftSlots]
SingleSlots = Callable[..., DraftSlots]


@pytest.fixture(params=[extend_slots, extend_slots_in_torch], ids=["kernel", "torch"])
def extend(request: pytest.FixtureRequest) -> ExtendSlots:
    """Both forms of the same computation."""
    form: ExtendSlots = request.param
    return form


@pytest.fixture(params=[single_slots, single_slots_in_torch], ids=["kernel", "torch"])
def single(request: pytest.FixtureRequest) -> SingleSlots:
    """Both forms of the same computation."""
    form: SingleSlots = request.param
    return form


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_slot_of_a_token_lies_at_the_next_index_and_sees_one_key_more(extend: ExtendSlots) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[1] = 10
    derive(plan(decode(1, 10, 2)), state, meta)
    slots = extend(meta)
    assert slots.position.tolist() == [10, 11, 12]
    assert slots.write_index.tolist() == [11, 12, 13]
    assert slots.kv_len.tolist() == [12, 13, 14]
    assert slots.token_seat.tolist() == [1, 1, 1]


def test_a_hit_writes_the_first_draft_entry_above_it_but_no_target_entry_below_it(extend: ExtendSlots) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    derive(plan(context(0, 15, [7, 8, 9, -1], write_from=16, max_length=40, fresh=True)), state, meta)
    assert meta.write_index.tolist() == [-1, 16, 17]
    assert extend(meta).write_index.tolist() == [16, 17, 18]


def test_no_slot_lies_below_write_from(extend: ExtendSlots) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    derive(plan(context(0, 4, [7, 8, 9, 10, -1], write_from=7, max_length=40, fresh=True)), state, meta)
    slots = extend(meta)
    assert slots.write_index.tolist() == [-1, -1, 7, 8]
    assert slots.kv_len.tolist() == [6, 7, 8, 9]


def test_the_token_after_each_token_comes_from_the_prompt_or_from_what_the_target_decided() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[2] = 10
    rows = [
        context(0, 0, [1, 2, 3], fresh=True, samples=False),
        context(1, 0, [4, 5, -1], fresh=True),
        decode(2, 10, 2),
    ]
    derive(plan(*rows), state, meta, pad_rows=6, pad_tokens=10)
    assert extend_token_ids(meta, ids(50, 60, 61, 62)).tolist() == [2, 3, 5, 50, 60, 61, 62, 0, 0, 0]


def test_random_steps_agree_with_a_token_by_token_model(py_rng: random.Random, extend: ExtendSlots) -> None:
    inside_seen = {True: 0, False: 0}
    for _ in range(300):
        state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
        rows = random_rows(py_rng, LIMITS, state)
        derive(plan(*rows), state, meta, pad_rows=8, pad_tokens=64)
        slots = extend(meta)
        t = 0
        for row in rows:
            length = row.first_index if row.fresh else min(int(state.length[row.seat]), row.first_index)
            for offset in range(row.query_len):
                position = length + offset
                inside = position + 1 < row.max_length
                inside_seen[inside] += 1
                assert int(slots.kv_len[t]) == (position + 2 if inside else 0)
                written = inside and position + 1 >= row.write_from
                assert int(slots.write_index[t]) == (position + 1 if written else -1)
                assert int(slots.token_seat[t]) == row.seat
                if inside:
                    assert int(slots.position[t]) == position
                t += 1
        assert (slots.kv_len[t:] == 0).all()
        assert (slots.write_index[t:] == -1).all()
        assert (slots.position >= 0).all()
    assert min(inside_seen.values()) > 100


def test_deriving_again_after_the_seats_moved_on_gives_slots_within_the_planned_length(extend: ExtendSlots) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[0] = 5
    rows = plan(decode(0, 5, 3))
    derive(rows, state, meta)
    before = extend(meta).write_index.tolist()
    state.length[0] = 9
    derive(rows, state, meta)
    assert extend(meta).write_index.tolist() == before == [6, 7, 8, 9]


def test_single_steps_lie_at_the_index_of_their_token_until_the_limit(single: SingleSlots) -> None:
    drafts = torch.full((3, 2), 7, dtype=torch.int32)
    seat, newest, most = ids(3, 1, 2), ids(10, 38, 0), ids(40, 40, 40)
    slots = single(seat, newest, most, ids(50, 51, 52), 1, drafts)
    assert slots.token_seat.tolist() == [3, 1, 2]
    assert slots.position.tolist() == [10, 38, 0]
    assert slots.write_index.tolist() == [11, 39, -1]
    assert slots.kv_len.tolist() == [12, 40, 0]
    assert drafts.tolist() == [[50, 7], [51, 7], [-1, 7]]
    slots = single(seat, newest, most, ids(60, 61, 62), 2, drafts)
    assert slots.write_index.tolist() == [12, -1, -1]
    assert slots.kv_len.tolist() == [13, 0, 0]
    assert drafts.tolist() == [[50, 60], [51, -1], [-1, -1]]


@pytest.mark.parametrize("step", [0, 3])
def test_a_single_step_outside_the_drafts_is_refused(step: int) -> None:
    with pytest.raises(InvalidArgument, match=f"step is {step}, allowed are 1 to 2"):
        single_slots(ids(0), ids(1), ids(9), ids(5), step, torch.zeros((1, 2), dtype=torch.int32))
