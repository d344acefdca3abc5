"""Which drafts a round accepts."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.core import InvalidArgument
from tandem.msa import Limits, SeatState, StepMetadata, derive
from tandem.spec import Verified, kept_positions
from tandem.spec import verify as verify_on_device
from tandem.spec.verify import verify_in_torch
from tests.python.msa.plans import Row, context, decode, plan

LIMITS = Limits(
    max_seats=6,
    max_tokens=64,
    max_rows=8,
    max_model_len=64,
    tokens_per_page=8,
    max_pages=8,
    max_draft_len=4,
    num_slots=48,
)


Verify = Callable[[StepMetadata, Tensor, Tensor], Verified]


@pytest.fixture(params=[verify_on_device, verify_in_torch], ids=["kernel", "torch"])
def verify(request: pytest.FixtureRequest) -> Verify:
    """Both forms of the same computation."""
    form: Verify = request.param
    return form


def step(rows: list[Row], state: SeatState, **padding: int) -> StepMetadata:
    meta = StepMetadata(LIMITS)
    derive(plan(*rows), state, meta, **padding)
    return meta


Verdict = Callable[[list[Row], SeatState, list[int]], Verified]


@pytest.fixture
def verified(verify: Verify) -> Verdict:
    return lambda rows, state, sampled: verify(
        step(rows, state), torch.tensor(sampled, dtype=torch.int32), state.drafts
    )


def seats(*drafts: list[int]) -> SeatState:
    state = SeatState(LIMITS)
    for seat, row in enumerate(drafts):
        state.drafts[seat, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return state


def test_the_longest_matching_run_is_accepted_and_the_token_after_it_is_the_targets(verified: Verdict) -> None:
    for accepted in range(5):
        drafts = [10, 11, 12, 13]
        sampled = [*drafts[:accepted], 50, *range(60, 64 - accepted)]
        result = verified([decode(0, 3, 4)], seats(drafts), sampled)
        assert result.num_accepted.tolist() == [accepted]
        assert result.newest.tolist() == [50]
        assert result.place.tolist() == [accepted]


def test_a_match_after_a_mismatch_counts_for_nothing(verified: Verdict) -> None:
    result = verified([decode(0, 3, 3)], seats([10, 11, 12]), [10, 99, 12, 13])
    assert result.num_accepted.tolist() == [1]
    assert result.newest.tolist() == [99]


def test_an_absent_draft_never_matches_not_even_the_token_that_it_is_fed_as(verified: Verdict) -> None:
    result = verified([decode(0, 3, 2)], seats([-1, 11]), [0, 11, 12])
    assert result.num_accepted.tolist() == [0]
    assert result.newest.tolist() == [0]


def test_drafts_that_a_row_was_not_fed_are_not_compared_with_its_neighbours_tokens(verified: Verdict) -> None:
    # Seat 0 holds four drafts and feeds one; the next row's tokens continue them.
    result = verified([decode(0, 3, 1), decode(1, 3, 2)], seats([5, 6, 7, 8], [7, 8]), [5, 6, 7, 8, 9])
    assert result.num_accepted.tolist() == [1, 2]
    assert result.newest.tolist() == [6, 9]


def test_rows_of_every_kind_in_one_step_agree_with_a_loop_over_their_tokens(
    py_rng: random.Random, verify: Verify
) -> None:
    for _ in range(200):
        state = SeatState(LIMITS)
        state.tokens[:] = torch.tensor(
            [[py_rng.randint(-1, 2) for _ in range(5)] for _ in range(LIMITS.max_seats + 1)], dtype=torch.int32
        )
        rows = []
        for seat in py_rng.sample(range(LIMITS.max_seats), py_rng.randint(1, 6)):
            if py_rng.random() < 0.3:
                final = py_rng.random() < 0.5
                rows.append(context(seat, 0, [1, 2, 3, -1 if final else 4], fresh=True, samples=final))
            else:
                state.length[seat] = 9
                rows.append(decode(seat, 9, py_rng.randint(0, 4)))
        sampled, expected, kept, start = [], [], [], 0
        for row in rows:
            if row.samples:
                count = 1 + row.num_drafts
                tokens = [py_rng.randint(0, 2) for _ in range(count)]
                accepted = 0
                while accepted < row.num_drafts and tokens[accepted] == int(state.drafts[row.seat, accepted]):
                    accepted += 1
                expected.append((accepted, tokens[accepted], start + row.query_len - count + accepted))
                sampled += tokens
                kept += [place <= accepted for place in range(count)]
            start += row.query_len
        meta = step(rows, state, pad_rows=8, pad_tokens=48)
        result = verify(meta, torch.tensor(sampled, dtype=torch.int32), state.drafts)
        got = zip(result.num_accepted.tolist(), result.newest.tolist(), result.place.tolist(), strict=True)
        assert list(got) == expected
        assert kept_positions(meta, result).tolist() == kept


def test_more_drafts_than_positions_are_refused() -> None:
    state = seats([10, 11])
    meta = step([decode(0, 3, 2), decode(1, 3, 1)], state)
    meta.row_num_drafts[1] = 3
    with pytest.raises(InvalidArgument, match="sampling row 1 has positions 3 to 5 of 5 and 3 drafts"):
        verify_on_device(meta, torch.zeros(5, dtype=torch.int32), state.drafts)
