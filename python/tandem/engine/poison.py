"""Debugging aid: memory that nobody has written is NaN, so that reading it shows at once."""

from __future__ import annotations

from torch import Tensor

from tandem.core import sched

# All bits set is NaN in fp32, fp16, bf16 and fp8 alike.
_NAN_BYTE = 0xFF


class PoolPoison:
    """Fills the pool with NaN at the start, and each slot again when a row gets it for writing.

    A slot that a row gets as a prefix hit keeps its content. So whatever an earlier owner left in a slot, beyond its
    end or before its eviction, can never be read as a plausible number.

    Args:
        pool: uint8 ``[num_slots * slot_bytes]``.
        slot_bytes: bytes of one slot.
        tokens_per_page: tokens of one page.
    """

    def __init__(self, pool: Tensor, slot_bytes: int, tokens_per_page: int) -> None:
        self._slots = pool.view(-1, slot_bytes)
        self._tokens_per_page = tokens_per_page
        self._slots.fill_(_NAN_BYTE)

    def __call__(self, plan: sched.StepPlan) -> None:
        """Fill the slots that ``plan`` hands out for writing; to be called before the step runs."""
        write_from = dict(zip(plan.seat.tolist(), plan.write_from.tolist(), strict=True))
        for seat, page, slot in plan.table_changes.tolist():
            if page * self._tokens_per_page >= write_from[seat]:
                self._slots[slot].fill_(_NAN_BYTE)
