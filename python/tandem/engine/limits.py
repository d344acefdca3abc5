"""Sizes of one engine, resolved once from what was asked for and what there is."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.errors import InvalidParameterError, PoolTooSmallError
from tandem.msa import Limits

DEFAULT_MAX_SEATS = 32
DEFAULT_MAX_TOKENS_PER_STEP = 512
# The rest is left to activations, the tokenizer, the caller, and whatever else runs on the machine.
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class SizeRequest:
    """What the caller asks for; None takes the default.

    ``kv_cache_bytes``: by default half the free memory, but no more than ``max_seats`` sequences of full length can
    use. ``max_model_len``: tokens of one sequence, prompt and output; by default the model's own limit.
    """

    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_seats: int | None = None
    max_tokens_per_step: int | None = None
    draft_len: int = 0


def resolve_limits(
    request: SizeRequest, *, position_limit: int, tokens_per_page: int, slot_bytes: int, free_bytes: int
) -> Limits:
    """The engine's limits.

    Args:
        request: what was asked for.
        position_limit: the model's longest sequence, in tokens.
        tokens_per_page: tokens of a page.
        slot_bytes: bytes of a page over all layers.
        free_bytes: memory that is free now, from which the pool's default size is taken.

    Raises:
        InvalidParameterError: a size is out of range.
        PoolTooSmallError: the pool cannot hold one sequence of ``max_model_len`` tokens.
    """
    max_model_len = _at_least("max_model_len", request.max_model_len, position_limit, 2)
    if max_model_len > position_limit:
        raise InvalidParameterError("max_model_len", max_model_len, f"at most the model's {position_limit} positions")
    max_seats = _at_least("max_seats", request.max_seats, DEFAULT_MAX_SEATS, 1)
    row_tokens = 1 + request.draft_len
    default_tokens = max(DEFAULT_MAX_TOKENS_PER_STEP, max_seats * row_tokens)
    max_tokens = _at_least("max_tokens_per_step", request.max_tokens_per_step, default_tokens, row_tokens)
    max_pages = -(-max_model_len // tokens_per_page)
    needed_bytes = max_pages * slot_bytes
    usable_bytes = min(int(free_bytes * _SHARE_OF_FREE_MEMORY), max_seats * needed_bytes)
    pool_bytes = _at_least("kv_cache_bytes", request.kv_cache_bytes, usable_bytes, 0)
    num_slots = pool_bytes // slot_bytes
    if num_slots < max_pages:
        raise PoolTooSmallError(pool_bytes, needed_bytes, max_model_len)
    return Limits(
        max_seats=max_seats,
        max_tokens=max_tokens,
        max_rows=max_seats,
        max_model_len=max_model_len,
        tokens_per_page=tokens_per_page,
        max_pages=max_pages,
        max_draft_len=request.draft_len,
        num_slots=num_slots,
    )


def _at_least(name: str, value: int | None, default: int, least: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
        raise InvalidParameterError(name, value, f"an integer of at least {least}")
    return value
