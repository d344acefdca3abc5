"""Sizes fixed once at start: everything allocated, captured or planned is bounded by them."""

from dataclasses import dataclass, fields


class LimitError(ValueError):
    """A size that does not fit the limits; the message names what was given and what is allowed."""


@dataclass(frozen=True)
class Limits:
    """The bounds of one engine. All counts are per engine, tokens unless said otherwise.

    Raises `LimitError` where a value is out of range or two values contradict each other.
    """

    max_seats: int
    """Sequences that can run at once."""
    max_tokens: int
    """Tokens of one step, padding included."""
    max_rows: int
    """Rows of one step, padding included."""
    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    tokens_per_page: int
    """Tokens of a cache page, which is also one MSA block."""
    max_pages: int
    """Pages of one sequence: the width of the block table."""
    max_draft_len: int
    """Draft tokens of one decode row; 0 without a drafter."""
    num_slots: int
    """Slots of the page pool."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "max_draft_len" else 1
            if not isinstance(value, int) or not least <= value < 2**31:
                raise LimitError(f"{field.name} is {value!r}, allowed are integers from {least} to 2**31 - 1")
        if self.max_pages * self.tokens_per_page < self.max_model_len:
            raise LimitError(
                f"max_pages {self.max_pages} x tokens_per_page {self.tokens_per_page} cannot hold "
                f"max_model_len {self.max_model_len}"
            )
        if self.max_tokens < 1 + self.max_draft_len:
            raise LimitError(f"max_tokens {self.max_tokens} cannot hold one row of 1 + {self.max_draft_len} drafts")
