"""Verification: which drafts a round accepts, and which token it ends with.

The target decides the token at every position of a round as it would without drafts: noise, masks and penalties are
those of the position. A draft is accepted iff it equals that token and so were all drafts before it; the token after
the last accepted one is the target's own. So the text does not depend on what was drafted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.msa import StepMetadata


@dataclass(frozen=True)
class Verified:
    """The outcome of a step for its N sampling rows, all [N] int32 on the device.

    Attributes:
        num_accepted: accepted drafts; 0 for a context row.
        newest: the newest token, after the last accepted draft.
        place: the step's token whose logits decided it.
    """

    num_accepted: Tensor
    newest: Tensor
    place: Tensor


def verify(meta: StepMetadata, sampled: Tensor, drafts: Tensor) -> Verified:
    """Compare what the target decided with what was drafted.

    Args:
        meta: the derived step.
        sampled: int32 [L], the token decided at each of `meta.logit_token`.
        drafts: int32 [S, K], the seats' drafts as the step was fed with them; -1 never matches.

    On the CPU it is one kernel.
    """
    if meta.num_logits == meta.num_samples:
        return Verified(torch.zeros_like(sampled), sampled, meta.logit_token)
    if sampled.device.type != "cpu":
        return verify_in_torch(meta, sampled, drafts)
    verified = Verified(*torch.empty((3, meta.num_samples), dtype=torch.int32))
    cpu.verify_rounds(
        meta.logit_start,
        meta.logit_token,
        sampled,
        meta.sample_row,
        meta.sample_seat,
        meta.row_num_drafts,
        drafts,
        *(verified.num_accepted, verified.newest, verified.place),
    )
    return verified


def verify_in_torch(meta: StepMetadata, sampled: Tensor, drafts: Tensor) -> Verified:
    """As `verify`, in operations of any device."""
    first = meta.logit_start[:-1]
    offset = torch.arange(drafts.shape[1] + 1, dtype=torch.int32, device=sampled.device)
    # Where a row has fewer drafts, later columns are another row's and are not counted.
    column = (first[:, None] + offset).clamp(max=meta.num_logits - 1)
    decided = sampled[column]
    fed = drafts.index_select(0, meta.sample_seat)
    num_drafts = meta.row_num_drafts.index_select(0, meta.sample_row)
    accepted = (decided[:, :-1] == fed) & (offset[:-1] < num_drafts[:, None])
    num_accepted = accepted.to(torch.int32).cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    last = num_accepted[:, None].to(torch.int64)
    newest = decided.gather(1, last).squeeze(1)
    return Verified(num_accepted, newest, meta.logit_token[column.gather(1, last).squeeze(1)])


def kept_positions(meta: StepMetadata, verified: Verified) -> Tensor:
    """Return which of `meta.logit_token` decided a token of the text, bool [L]: those up to each row's newest token."""
    position = torch.arange(meta.num_logits, dtype=torch.int32, device=meta.logit_token.device)
    row = torch.searchsorted(meta.logit_start[1:].contiguous(), position, right=True)
    return position - meta.logit_start[row] <= verified.num_accepted[row]
