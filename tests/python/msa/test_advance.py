"""What a verified step does to the seats."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from tandem.msa import Limits, RowKind, SeatState, StepMetadata, derive
from tandem.msa import advance as advance_by_kernel
from tandem.msa.metadata import advance_in_torch

from .plans import context, decode, plan, random_rows

LIMITS = Limits(
    max_seats=4,
    max_tokens=32,
    max_rows=6,
    max_model_len=48,
    tokens_per_page=4,
    max_pages=12,
    max_draft_len=3,
    num_slots=48,
)


@pytest.fixture(params=[advance_by_kernel, advance_in_torch], ids=["kernel", "torch"])
def advance(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_context_rows_grow_by_their_tokens_and_decode_rows_by_the_accepted_drafts_and_one(
    advance: Callable[..., None],
) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:4] = ids(9, 0, 5, 3)
    rows = [decode(0, 12, 3), context(1, 0, [1, 2, 3, -1]), decode(2, 5)]
    derive(plan(*rows), state, meta)
    advance(state, meta, ids(70, 71, 72), ids(2, 0, 0))
    assert state.length.tolist() == [12, 3, 6, 3, 0]
    assert state.last_token.tolist() == [70, 71, 72, -1, -1]


def test_a_chunk_that_does_not_sample_moves_the_length_and_keeps_the_last_token(advance: Callable[..., None]) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.tokens[1, 0] = 33
    rows = [context(1, 4, [1, 2, 3], fresh=True, samples=False), decode(0, 0)]
    derive(plan(*rows), state, meta)
    advance(state, meta, ids(70))
    assert state.length.tolist() == [1, 6, 0, 0, 0]
    assert state.last_token.tolist() == [70, 33, -1, -1, -1]


def test_a_length_never_passes_the_limit_of_its_sequence(advance: Callable[..., None]) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[0] = 9
    derive(plan(decode(0, 9, 3, max_length=11)), state, meta)
    advance(state, meta, ids(70), ids(3))
    assert int(state.length[0]) == 11


def test_a_row_cannot_accept_more_drafts_than_it_fed(advance: Callable[..., None]) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:2] = ids(9, 0)
    derive(plan(decode(0, 9, 1), context(1, 0, [1, 2, -1])), state, meta)
    advance(state, meta, ids(70, 71), ids(3, 3))
    assert state.length.tolist() == [11, 2, 0, 0, 0]


def test_padding_rows_advance_no_seat(advance: Callable[..., None]) -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:4] = ids(9, 8, 7, 6)
    derive(plan(decode(2, 7)), state, meta, pad_rows=6, pad_tokens=16)
    advance(state, meta, ids(70))
    assert state.length.tolist() == [9, 8, 8, 6, 0]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rounds_that_advance_on_the_device_walk_through_pages_without_the_host(
    advance: Callable[..., None], accepted: int
) -> None:
    """The host plans upper bounds only; the true indices of each round follow from the seats."""
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[3] = 2
    true_length, bound = 2, 2
    for _ in range(6):
        derive(plan(decode(3, bound, 3)), state, meta)
        assert meta.position.tolist() == [true_length + t for t in range(4)]
        advance(state, meta, ids(70), ids(accepted))
        true_length += 1 + accepted
        bound += 4
    assert int(meta.overrun) <= 0


def test_random_steps_advance_as_counted_row_by_row(advance: Callable[..., None], seed: int) -> None:
    rng = Random(seed)
    for _ in range(60):
        state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
        rows = [row for row in random_rows(rng, LIMITS, state) if row.first_index < row.max_length]
        derive(plan(*rows), state, meta, pad_rows=rng.randint(0, LIMITS.max_rows))
        lengths, newest = state.length.tolist(), state.last_token.tolist()
        sampling = [row for row in rows if row.samples]
        accepted = [rng.randint(0, LIMITS.max_draft_len) for _ in sampling]
        for row, length in zip(rows, meta.row_length.tolist(), strict=False):
            taken = accepted[sampling.index(row)] if row.samples else 0
            grown = row.query_len if row.kind == RowKind.CONTEXT else 1 + min(taken, row.num_drafts)
            lengths[row.seat] = min(length + grown, row.max_length)
        for token, row in enumerate(sampling, start=200):
            newest[row.seat] = token
        advance(state, meta, ids(*range(200, 200 + len(sampling))), ids(*accepted))
        assert state.length.tolist()[: LIMITS.max_seats] == lengths[: LIMITS.max_seats]
        assert state.last_token.tolist()[: LIMITS.max_seats] == newest[: LIMITS.max_seats]
