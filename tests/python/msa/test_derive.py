"""The derivation of a step's metadata, against a model that counts one token at a time."""

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.core import InvalidArgument
from tandem.msa import LimitError, Limits, SeatState, StepMetadata, derive

from .plans import Row, context, decode, expect, padding_token, plan, random_rows, tokens_of

LIMITS = Limits(
    max_seats=6,
    max_tokens=64,
    max_rows=8,
    max_model_len=48,
    tokens_per_page=4,
    max_pages=12,
    max_draft_len=3,
    num_slots=80,
)
PUBLIC = [
    "row_seat",
    "row_kind",
    "row_query_len",
    "row_num_drafts",
    "row_max_length",
    "row_length",
    "query_start",
    "token_row",
    "token_seat",
    "token_ids",
    "next_token_ids",
    "position",
    "write_index",
    "kv_len",
    "num_valid_blocks",
    "sample_row",
    "sample_seat",
    "logit_start",
    "logit_token",
    "overrun",
]


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with the kernel and with the torch operations that other devices use."""
    if request.param == "torch":
        monkeypatch.setattr(StepMetadata, "rederive", StepMetadata.rederive_in_torch)


def snapshot(meta: StepMetadata) -> dict[str, list[int]]:
    return {name: getattr(meta, name).tolist() for name in PUBLIC}


def seats(**lengths: int) -> SeatState:
    """Seats s0, s1, ... with the given lengths; seat s feeds tokens 10 s, 10 s + 1, ..."""
    state = SeatState(LIMITS)
    for name, length in lengths.items():
        seat = int(name[1:])
        state.length[seat] = length
        state.tokens[seat] = torch.arange(10 * seat, 10 * seat + 4)
    return state


@pytest.mark.parametrize("padded", [False, True])
def test_random_plans_agree_with_a_token_by_token_model(padded: bool) -> None:
    meta = StepMetadata(LIMITS)
    for seed in range(150):
        rng = Random(seed)
        state = SeatState(LIMITS)
        rows = random_rows(rng, LIMITS, state)
        num_tokens = sum(row.query_len for row in rows)
        shape = (
            {"pad_rows": LIMITS.max_rows, "pad_tokens": rng.randint(num_tokens, LIMITS.max_tokens)} if padded else {}
        )
        derive(plan(*rows), state, meta, **shape)
        want = expect(rows, state, LIMITS)
        num_rows = shape.get("pad_rows", len(rows))
        padding = [padding_token(num_rows, state)] * (shape.get("pad_tokens", num_tokens) - num_tokens)
        assert tokens_of(meta) == want.tokens + padding, f"seed {seed}"
        assert meta.row_length.tolist() == want.row_length + [0] * (num_rows - len(rows)), f"seed {seed}"
        assert max(int(meta.overrun), 0) == want.overrun, f"seed {seed}"
        starts = np.cumsum([0] + [row.query_len for row in rows]).tolist()
        assert meta.query_start.tolist() == starts + starts[-1:] * (num_rows - len(rows)), f"seed {seed}"


def test_a_sequence_of_plans_leaves_nothing_of_the_earlier_ones_behind() -> None:
    reused = StepMetadata(LIMITS)
    rng = Random(7)
    state = SeatState(LIMITS)
    for step in range(120):
        if step % 3 == 0:
            rows = random_rows(rng, LIMITS, state)
        else:  # the same rows again, one token further, as in steady decode
            for row in rows:
                row.first_index += 1
        derive(plan(*rows), state, reused)
        clean = StepMetadata(LIMITS)
        derive(plan(*rows), state, clean)
        assert snapshot(reused) == snapshot(clean), f"step {step}"


@pytest.mark.parametrize(
    "change",
    [
        {"seat": 4},
        {"num_drafts": 1},
        {"write_from": 9},
        {"max_length": 10},
        {"samples": False},
        {"fresh": True},
        {"first_index": 8},
    ],
)
def test_a_decode_batch_that_differs_in_one_respect_is_staged_anew(change: dict[str, int]) -> None:
    state, meta = seats(s0=9, s1=7, s4=11), StepMetadata(LIMITS)
    derive(plan(decode(0, 9), decode(1, 7)), state, meta)
    other = plan(replace(decode(0, 9), **change), decode(1, 7))
    derive(other, state, meta)
    clean = StepMetadata(LIMITS)
    derive(other, state, clean)
    assert snapshot(meta) == snapshot(clean)


def test_a_plan_that_cannot_be_staged_leaves_the_next_one_right() -> None:
    state, meta = seats(s0=9), StepMetadata(LIMITS)
    good = plan(decode(0, 9, 3))
    derive(good, state, meta)
    want = snapshot(meta)
    broken = replace(plan(context(1, 0, [1, 2, 3, 4, 5])), token_offsets=np.array([100, 105], dtype=np.int32))
    with pytest.raises(IndexError):
        derive(broken, state, meta)
    derive(good, state, meta)
    assert snapshot(meta) == want


def test_deriving_twice_gives_the_same_metadata() -> None:
    state, meta = seats(s0=9, s3=5), StepMetadata(LIMITS)
    rows = plan(decode(0, 10, 3), context(3, 5, [1, 2, 3]))
    derive(rows, state, meta)
    once = snapshot(meta)
    derive(rows, state, meta)
    assert snapshot(meta) == once
    meta.rederive(state)
    assert snapshot(meta) == once


def test_a_draft_loop_that_advanced_the_lengths_in_between_changes_nothing_but_the_overrun() -> None:
    state, meta = seats(s0=9, s1=4, s3=5), StepMetadata(LIMITS)
    rows = plan(decode(0, 9, 3), decode(1, 4), context(3, 5, [1, 2, 3]))
    derive(rows, state, meta)
    before = snapshot(meta)
    state.length[0] += 2
    state.length[3] += 1
    meta.rederive(state)
    after = snapshot(meta)
    assert (before.pop("overrun"), after.pop("overrun")) == (0, 2)
    assert after == before


def test_a_length_beyond_the_plan_is_cut_to_it_and_reported() -> None:
    state, meta = seats(s0=9, s1=12), StepMetadata(LIMITS)
    derive(plan(decode(0, 8), decode(1, 12)), state, meta)
    assert meta.row_length.tolist() == [8, 12]
    assert int(meta.overrun) == 1


def test_a_length_below_the_planned_bound_is_no_overrun() -> None:
    state, meta = seats(s0=5), StepMetadata(LIMITS)
    derive(plan(decode(0, 9, 3)), state, meta)
    assert meta.row_length.tolist() == [5]
    assert int(meta.overrun) <= 0


def test_per_token_valid_blocks_form_a_ladder_over_a_verify_row_and_in_a_mixed_batch() -> None:
    state, meta = seats(s0=6, s1=7, s2=0), StepMetadata(LIMITS)
    derive(plan(decode(0, 6, 3)), state, meta)
    assert meta.kv_len.tolist() == [7, 8, 9, 10]
    assert meta.num_valid_blocks.tolist() == [2, 2, 3, 3]
    derive(plan(context(2, 0, [1, 2, 3, 4, 5, 6]), decode(0, 6, 3), decode(1, 7)), state, meta)
    assert meta.num_valid_blocks.tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3, 2]


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_every_partial_rejection_rederives_indices_counts_and_lengths_across_page_edges(num_drafts: int) -> None:
    meta = StepMetadata(LIMITS)
    for length in range(2 * LIMITS.tokens_per_page + 1):
        for accepted in range(num_drafts + 1):
            state = seats(s2=length)
            bystander = decode(4, 3)
            state.length[4] = 3
            # Planned before the acceptance is known: the bound is the full round.
            ahead = decode(2, length + 1 + num_drafts, num_drafts)
            state.length[2] = length + 1 + accepted
            derive(plan(ahead, bystander), state, meta)
            indices = [length + 1 + accepted + t for t in range(1 + num_drafts)]
            assert meta.write_index.tolist() == [*indices, 3]
            assert meta.position.tolist() == [*indices, 3]
            assert meta.kv_len.tolist() == [index + 1 for index in [*indices, 3]]
            assert meta.num_valid_blocks.tolist() == [index // 4 + 1 for index in [*indices, 3]]
            assert meta.row_length.tolist() == [indices[0], 3]


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_rounds_planned_a_step_ahead_follow_the_true_length_through_every_pattern_of_rejection(num_drafts: int) -> None:
    """Also derived twice, and after a draft loop that moved the length on: at most to where the plan ends."""
    meta = StepMetadata(LIMITS)
    patterns = itertools.product(range(num_drafts + 1), repeat=4)
    for accepted, start in itertools.product(patterns, range(5, 5 + LIMITS.tokens_per_page)):
        state = seats(s2=start)
        length = bound = start
        for round_accepted in accepted:
            rows = plan(decode(2, bound, num_drafts))
            derive(rows, state, meta)
            once = snapshot(meta)
            assert once["write_index"] == [length + t for t in range(1 + num_drafts)]
            assert once["num_valid_blocks"] == [(length + t) // 4 + 1 for t in range(1 + num_drafts)]
            assert once["overrun"] <= 0
            derive(rows, state, meta)
            assert snapshot(meta) == once
            for ahead in (1, 2 * num_drafts, 20):
                state.length[2] = length + ahead
                derive(rows, state, meta)
                assert meta.row_length.tolist() == [min(length + ahead, bound)]
                assert max(int(meta.overrun), 0) == max(length + ahead - bound, 0)
            # The next step is planned when this one's outcome is not known.
            bound = length + 1 + num_drafts
            length += 1 + round_accepted
            state.length[2] = length


def test_tokens_past_the_limit_of_the_sequence_become_padding() -> None:
    state, meta = seats(s0=9), StepMetadata(LIMITS)
    derive(plan(decode(0, 9, 3, max_length=11)), state, meta)
    assert meta.kv_len.tolist() == [10, 11, 0, 0]
    assert meta.write_index.tolist() == [9, 10, -1, -1]
    assert meta.position.tolist() == [9, 10, 0, 0]
    assert meta.num_valid_blocks.tolist() == [3, 3, 0, 0]


def test_padding_stays_in_range_and_touches_nothing() -> None:
    state, meta = seats(s0=9, s5=4), StepMetadata(LIMITS)
    derive(plan(decode(5, 4)), state, meta, pad_rows=4, pad_tokens=8)
    assert meta.token_seat.tolist() == [5] + [LIMITS.max_seats] * 7
    assert int(meta.token_seat.max()) < state.block_table.shape[0]
    assert meta.write_index.tolist() == [4] + [-1] * 7
    assert meta.kv_len.tolist() == [5] + [0] * 7
    assert meta.num_valid_blocks.tolist() == [2] + [0] * 7
    assert meta.token_ids.tolist() == [50] + [0] * 7
    assert meta.query_start.tolist() == [0, 1, 1, 1, 1]
    assert meta.row_query_len.tolist() == [1, 0, 0, 0]


def test_a_step_of_padding_alone_is_legal() -> None:
    state, meta = seats(s0=9), StepMetadata(LIMITS)
    derive(plan(), state, meta, pad_rows=2, pad_tokens=4)
    assert meta.kv_len.tolist() == [0] * 4
    assert meta.write_index.tolist() == [-1] * 4
    assert (meta.num_samples, meta.num_logits) == (0, 0)
    derive(plan(), state, meta)
    assert (meta.num_rows, meta.num_tokens) == (0, 0)


def test_a_fresh_row_takes_the_planned_index_whatever_the_seat_held() -> None:
    for stale in (0, 3, 40):
        state, meta = seats(s1=stale), StepMetadata(LIMITS)
        derive(plan(context(1, 8, [1, 2, 3], fresh=True)), state, meta)
        assert meta.write_index.tolist() == [8, 9]
        assert int(meta.overrun) <= 0


def test_a_prefix_hit_of_the_whole_prompt_reruns_one_token_and_writes_no_target_entry() -> None:
    state, meta = seats(), StepMetadata(LIMITS)
    derive(plan(context(0, 7, [42, -1], fresh=True, write_from=8)), state, meta)
    assert meta.write_index.tolist() == [-1]
    assert meta.kv_len.tolist() == [8]
    assert meta.num_valid_blocks.tolist() == [2]


def test_a_write_happens_exactly_from_write_from_on() -> None:
    state, meta = seats(), StepMetadata(LIMITS)
    derive(plan(context(0, 3, [1, 2, 3, 4, 5], fresh=True, write_from=5)), state, meta)
    assert meta.write_index.tolist() == [-1, -1, 5, 6]
    assert meta.kv_len.tolist() == [4, 5, 6, 7]


def test_context_rows_expose_the_token_after_each_of_theirs() -> None:
    state, meta = seats(s0=2), StepMetadata(LIMITS)
    derive(plan(context(1, 0, [5, 6, 7, 8]), decode(0, 2, 1), context(2, 0, [9, -1])), state, meta)
    assert meta.token_ids.tolist() == [5, 6, 7, 0, 1, 9]
    assert meta.next_token_ids.tolist() == [6, 7, 8, -1, -1, -1]


def test_absent_drafts_are_fed_as_a_legal_id_and_keep_their_place_in_the_seat() -> None:
    state, meta = seats(s1=2), StepMetadata(LIMITS)
    state.drafts[1] = torch.tensor([11, -1, -1])
    derive(plan(decode(1, 2, 3)), state, meta)
    assert meta.token_ids.tolist() == [10, 11, 0, 0]
    assert state.drafts[1].tolist() == [11, -1, -1]


def test_logits_are_asked_for_every_token_of_a_decode_row_and_the_last_of_a_sampling_context_row() -> None:
    state, meta = seats(s0=5, s4=1), StepMetadata(LIMITS)
    rows = [context(1, 0, [1, 2, 3]), decode(0, 5, 2), context(2, 0, [4, 5], samples=False), decode(4, 1)]
    derive(plan(*rows), state, meta)
    assert meta.sample_row.tolist() == [0, 1, 3]
    assert meta.sample_seat.tolist() == [1, 0, 4]
    assert meta.logit_start.tolist() == [0, 1, 4, 5]
    assert meta.logit_token.tolist() == [1, 2, 3, 4, 6]


def test_table_changes_are_applied_before_the_step_and_change_nothing_else() -> None:
    state, meta = seats(), StepMetadata(LIMITS)
    before = state.block_table.clone()
    derive(plan(context(3, 0, [1, 2]), changes=[(3, 0, 17), (3, 11, 4), (0, 2, 9)]), state, meta)
    before[3, 0], before[3, 11], before[0, 2] = 17, 4, 9
    assert torch.equal(state.block_table, before)


@pytest.mark.parametrize("change", [(-1, 0, 1), (0, -1, 1), (7, 0, 1), (0, 12, 1), (0, 0, -1)])
def test_a_table_change_outside_the_table_is_refused_and_changes_nothing(change: tuple[int, int, int]) -> None:
    state, meta = seats(), StepMetadata(LIMITS)
    before = state.block_table.clone()
    with pytest.raises(LimitError, match="outside the table"):
        derive(plan(decode(0, 0), changes=[(0, 1, 5), change]), state, meta)
    assert torch.equal(state.block_table, before)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([decode(seat, 0) for seat in range(6)] + [context(0, 0, [1, 2])] * 3, "9 rows"),
        ([context(0, 0, [1] * 66)], "65 tokens"),
        ([Row(0, 0, num_drafts=4)], "max_draft_len 3"),
        ([decode(0, 0, max_length=49)], "max_length 49"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused_by_name(rows: list[Row], message: str) -> None:
    with pytest.raises(LimitError, match=message):
        derive(plan(*rows), seats(), StepMetadata(LIMITS))


def test_a_seat_that_does_not_exist_is_refused() -> None:
    state, meta = seats(s0=5), StepMetadata(LIMITS)
    with pytest.raises((IndexError, InvalidArgument)):
        derive(plan(decode(LIMITS.max_seats + 1, 5)), state, meta)


def test_views_of_a_shape_keep_their_addresses() -> None:
    state, meta = seats(s0=5, s1=6), StepMetadata(LIMITS)
    derive(plan(decode(0, 5, 3)), state, meta)
    addresses = {name: getattr(meta, name).data_ptr() for name in PUBLIC}
    derive(plan(context(1, 0, [1, 2, 3]), decode(0, 5)), state, meta)
    derive(plan(decode(1, 6, 3)), state, meta)
    assert {name: getattr(meta, name).data_ptr() for name in PUBLIC} == addresses


class DeviceOperations(TorchDispatchMode):
    """Records what runs, and which results are not memory that existed before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.names: list[str] = []
        self.new_results: list[str] = []
        self._known = known

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self._known:
            self.new_results.append(str(func))
        return result


def test_rederiving_in_torch_reads_nothing_back_and_allocates_nothing() -> None:
    state, meta = seats(s0=5), StepMetadata(LIMITS)
    derive(plan(decode(0, 7, 3), context(1, 0, [1, 2, 3])), state, meta)
    tensors = [value for holder in (meta, state) for value in vars(holder).values() if isinstance(value, torch.Tensor)]
    with DeviceOperations({tensor.untyped_storage().data_ptr() for tensor in tensors}) as operations:
        meta.rederive_in_torch(state)
    assert operations.names
    assert operations.new_results == []
    assert not [name for name in operations.names if "_local_scalar_dense" in name or "nonzero" in name]
