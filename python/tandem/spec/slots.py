"""Where draft slots lie: the one of position p is stored at token index p+1, so that it needs no token after its own.

Everything here follows from the derived step metadata in device operations; no value comes back to the host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.msa import StepMetadata


@dataclass(frozen=True)
class DraftSlots:
    """Draft slots as the attention backends take them. All int32 [T].

    Attributes:
        token_seat: seat of each slot.
        position: position p that a slot is rotated at; 0 for one that lies nowhere.
        write_index: index p+1 at which its keys and values are stored; -1 for nowhere.
        kv_len: p+2, one past that index; 0 for a slot that lies nowhere, which sees nothing.
    """

    token_seat: Tensor
    position: Tensor
    write_index: Tensor
    kv_len: Tensor


def extend_slots(meta: StepMetadata) -> DraftSlots:
    """Return the slots of all tokens of a step, [T]: the token at index p has the slot of position p.

    A slot whose index p+1 is beyond the sequence's limit lies nowhere, nor does a padding token's. On the CPU it is one
    kernel, as are single slots: small operations whose caches are cold took longer than the drafter's own.
    """
    if meta.device.type != "cpu":
        return extend_slots_in_torch(meta)
    write_index, kv_len = torch.empty_like(meta.kv_len), torch.empty_like(meta.kv_len)
    cpu.extend_slots(meta.kv_len, meta.token_max_length, meta.token_row, meta.row_write_from, write_index, kv_len)
    return DraftSlots(meta.token_seat, meta.position, write_index, kv_len)


def extend_slots_in_torch(meta: StepMetadata) -> DraftSlots:
    """As `extend_slots`, in operations of any device."""
    inside = (meta.kv_len > 0) & (meta.kv_len < meta.token_max_length)
    kv_len = torch.where(inside, meta.kv_len + 1, 0)
    # Index p+1, written iff it is at least write_from, hence iff kv_len is above it.
    written = inside & (kv_len > meta.row_write_from.index_select(0, meta.token_row))
    return DraftSlots(
        token_seat=meta.token_seat,
        position=meta.position,
        write_index=torch.where(written, meta.kv_len, -1),
        kv_len=kv_len,
    )


def extend_token_ids(meta: StepMetadata, sampled: Tensor) -> Tensor:
    """Return the token after each token of a step, int32 [T].

    Args:
        meta: the derived step.
        sampled: int32 [L], the token decided at each of `meta.logit_token`.

    Inside a prompt it is the prompt's, elsewhere what the target has decided there. After a draft that was accepted
    this is the next draft; after one that was not, the slot is dead and any id will do.
    """
    ids = meta.next_token_ids.clamp(min=0)
    return ids.index_put_((meta.logit_token,), sampled)


def single_slots(
    seat: Tensor, newest_index: Tensor, max_length: Tensor, draft: Tensor, step: int, drafts: Tensor
) -> DraftSlots:
    """Return the slots of the single step number `step` (from 1), one per row, and store the step's drafts.

    Args:
        seat: int32 [N].
        newest_index: int32 [N], the index of each row's newest known token; 0 where the row has none.
        max_length: int32 [N], tokens of each row's sequence at most.
        draft: int32 [N], the slot's token, at index newest_index + step, where the slot is stored too.
        step: 1 to K.
        drafts: int32 [N, K], of which column step - 1 gets the drafts, -1 where they lie beyond the limit.
    """
    if seat.device.type != "cpu":
        return single_slots_in_torch(seat, newest_index, max_length, draft, step, drafts)
    slots = DraftSlots(seat, *torch.empty((3, len(seat)), dtype=torch.int32))
    cpu.single_slots(newest_index, max_length, draft, step, slots.position, slots.write_index, slots.kv_len, drafts)
    return slots


def single_slots_in_torch(
    seat: Tensor, newest_index: Tensor, max_length: Tensor, draft: Tensor, step: int, drafts: Tensor
) -> DraftSlots:
    """As `single_slots`, in operations of any device."""
    index = newest_index + step
    inside = (newest_index > 0) & (index < max_length)
    drafts[:, step - 1] = torch.where(inside, draft, -1)
    return DraftSlots(
        token_seat=seat,
        position=torch.where(inside, index - 1, 0),
        write_index=torch.where(inside, index, -1),
        kv_len=torch.where(inside, index + 1, 0),
    )
