"""What the device knows of each running sequence."""

import torch
from torch import Tensor

from tandem.msa.limits import Limits


class SeatState:
    """Device tensors over seats; the host never mirrors them.

    There is one seat more than `limits.max_seats`: the last one belongs to padding rows, so that padding reads and
    writes in range without touching a sequence. All tensors are int32 and keep their address for life.

    Attributes:
        length: [S+1] tokens whose target entries are written; advanced by `advance` alone.
        last_token: [S+1] the token at index `length`, known but not yet written.
        drafts: [S+1, K] proposed tokens for the indices after it, -1 where there is none (never matches).
        block_table: [S+1, P] slot of each page of the sequence.
        tokens: [S+1, 1+K] storage of `last_token` and `drafts`, in the order in which a decode row feeds them.
        padding_seat: index of the last seat.
    """

    def __init__(self, limits: Limits, device: torch.device | str = "cpu") -> None:
        seats = limits.max_seats + 1
        self.padding_seat = limits.max_seats
        self.length = torch.zeros(seats, dtype=torch.int32, device=device)
        self.tokens = torch.full((seats, 1 + limits.max_draft_len), -1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros((seats, limits.max_pages), dtype=torch.int32, device=device)

    @property
    def device(self) -> torch.device:
        """Where all tensors of the state live."""
        return self.length.device

    @property
    def last_token(self) -> Tensor:
        """[S+1] int32 view of the first column of `tokens`."""
        return self.tokens[:, 0]

    @property
    def drafts(self) -> Tensor:
        """[S+1, K] int32 view of the other columns of `tokens`."""
        return self.tokens[:, 1:]
