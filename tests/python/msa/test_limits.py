"""Limits refuse what cannot work, by name."""

from dataclasses import replace

import pytest

from tandem.msa import LimitError, Limits

GOOD = Limits(
    max_seats=4,
    max_tokens=16,
    max_rows=4,
    max_model_len=48,
    tokens_per_page=4,
    max_pages=12,
    max_draft_len=3,
    num_slots=40,
)


@pytest.mark.parametrize(
    "name", ["max_seats", "max_tokens", "max_rows", "max_model_len", "tokens_per_page", "max_pages", "num_slots"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_a_size_out_of_range_is_refused_with_its_name_and_value(name: str, value: int) -> None:
    with pytest.raises(LimitError, match=rf"{name} is {value}"):
        replace(GOOD, **{name: value})


def test_no_drafter_is_a_draft_length_of_zero() -> None:
    assert replace(GOOD, max_draft_len=0).max_draft_len == 0
    with pytest.raises(LimitError, match="max_draft_len is -1"):
        replace(GOOD, max_draft_len=-1)


def test_a_table_too_narrow_for_the_longest_sequence_is_refused() -> None:
    with pytest.raises(LimitError, match="max_pages 11 x tokens_per_page 4 cannot hold max_model_len 48"):
        replace(GOOD, max_pages=11)


def test_a_step_too_small_for_one_verify_row_is_refused() -> None:
    with pytest.raises(LimitError, match="max_tokens 3 cannot hold one row of 1 \\+ 3 drafts"):
        replace(GOOD, max_tokens=3)
