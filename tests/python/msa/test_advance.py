"""What a verified step does to the seats."""

import pytest
import torch

from tandem.msa import Limits, SeatState, StepMetadata, advance, derive

from .plans import context, decode, plan

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


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_context_rows_grow_by_their_tokens_and_decode_rows_by_the_accepted_drafts_and_one() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:4] = ids(9, 0, 5, 3)
    rows = [decode(0, 12, 3), context(1, 0, [1, 2, 3, -1]), decode(2, 5)]
    derive(plan(*rows), state, meta)
    advance(state, meta, ids(70, 71, 72), ids(2, 0, 0))
    assert state.length.tolist() == [12, 3, 6, 3, 0]
    assert state.last_token.tolist() == [70, 71, 72, -1, -1]


def test_a_chunk_that_does_not_sample_moves_the_length_and_keeps_the_last_token() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.tokens[1, 0] = 33
    rows = [context(1, 4, [1, 2, 3], fresh=True, samples=False), decode(0, 0)]
    derive(plan(*rows), state, meta)
    advance(state, meta, ids(70))
    assert state.length.tolist() == [1, 6, 0, 0, 0]
    assert state.last_token.tolist() == [70, 33, -1, -1, -1]


def test_a_length_never_passes_the_limit_of_its_sequence() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[0] = 9
    derive(plan(decode(0, 9, 3, max_length=11)), state, meta)
    advance(state, meta, ids(70), ids(3))
    assert int(state.length[0]) == 11


def test_a_row_cannot_accept_more_drafts_than_it_fed() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:2] = ids(9, 0)
    derive(plan(decode(0, 9, 1), context(1, 0, [1, 2, -1])), state, meta)
    advance(state, meta, ids(70, 71), ids(3, 3))
    assert state.length.tolist() == [11, 2, 0, 0, 0]


def test_padding_rows_advance_no_seat() -> None:
    state, meta = SeatState(LIMITS), StepMetadata(LIMITS)
    state.length[:4] = ids(9, 8, 7, 6)
    derive(plan(decode(2, 7)), state, meta, pad_rows=6, pad_tokens=16)
    advance(state, meta, ids(70))
    assert state.length.tolist() == [9, 8, 8, 6, 0]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rounds_that_advance_on_the_device_walk_through_pages_without_the_host(accepted: int) -> None:
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
