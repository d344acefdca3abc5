"""The drafter's part of a step: it rides in the target's step and keeps its keys and values in the target's cache.

After the target's forward and the verification, one *extend* pass covers every token of the step, with the target's
exact hidden states; it replaces what single steps wrote before. Its slot of each row's last accepted token gives the
first new draft. Each *single step* then takes one draft per row and gives the next one.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.models.eagle3 import DraftedTokens, DraftOutput
from tandem.msa import AttentionBackend, SeatState, StepMetadata
from tandem.spec.slots import extend_slots, extend_token_ids, single_slots
from tandem.spec.verify import Verified


class Drafter(Protocol):
    """What the worker asks of a drafter; `tandem.models.eagle3.Eagle3` is one."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Numbers of target layers after which the states are taken that `first_hidden` wants."""

    def first_hidden(self, captured: Sequence[Tensor]) -> Tensor:
        """Hidden input [T, H] of the slots whose captured target states these are."""

    def forward(
        self, token_ids: Tensor, hidden: Tensor, slots: DraftedTokens, attention: AttentionBackend
    ) -> DraftOutput:
        """Run slots with tokens int32 [T] and hidden inputs [T, H], which are used up."""

    def propose(self, normed: Tensor) -> Tensor:
        """The draft int32 [N] of each normed hidden [N, H]."""


class DraftWorker:
    """Proposes the drafts of a step's rows: a function of device tensors, but for the draft layer's cache.

    Args:
        drafter: the drafter.
        attention: the cache that the draft layer is part of.
        max_draft_len: K, drafts per row at most.
    """

    def __init__(self, drafter: Drafter, attention: AttentionBackend, max_draft_len: int) -> None:
        self._drafter = drafter
        self._attention = attention
        self._max_draft_len = max_draft_len

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """What the target's forward must capture for `run`."""
        return self._drafter.aux_layers

    def run(
        self,
        meta: StepMetadata,
        sampled: Tensor,
        verified: Verified,
        captured: Sequence[Tensor],
        proposing: Tensor | None = None,
    ) -> Tensor:
        """Write the draft entries of all tokens of a step and return new drafts, int32 [N, K], -1 where there is none.

        Args:
            meta: the derived step.
            sampled: int32 [L], the token decided at each of `meta.logit_token`; empty where no row samples.
            verified: what became of the drafts that the step was fed.
            captured: the target's states of the step's tokens, each [T, H].
            proposing: int64 [P], the sampling rows to propose drafts for; all of them if None. Where it is empty, only
                the extend pass runs.
        """
        token_ids = extend_token_ids(meta, sampled)
        slots = extend_slots(meta)
        output = self._drafter.forward(token_ids, self._drafter.first_hidden(captured), slots, self._attention)
        place, seat, row = verified.place, meta.sample_seat, meta.sample_row
        if proposing is not None:
            place, seat, row = (each.index_select(0, proposing) for each in (place, seat, row))
        drafts = torch.full((len(place), self._max_draft_len), -1, dtype=torch.int32, device=place.device)
        if drafts.numel() > 0:
            self._propose(drafts, meta, seat, row, place, output)
        if proposing is None:
            return drafts
        every = torch.full((meta.num_samples, self._max_draft_len), -1, dtype=torch.int32, device=place.device)
        return every.index_copy_(0, proposing, drafts)

    def _propose(
        self, drafts: Tensor, meta: StepMetadata, seat: Tensor, row: Tensor, place: Tensor, output: DraftOutput
    ) -> None:
        """Fill `drafts` int32 [P, K] for the rows int32 [P] of these seats, whose newest tokens `place` has decided."""
        carried, normed = (rows.index_select(0, place) for rows in output)
        # One past the index of the last accepted token, which is the newest token's; 0 where it lies beyond the limit.
        newest_index = meta.kv_len.index_select(0, place)
        max_length = meta.row_max_length.index_select(0, row)
        for step in range(1, self._max_draft_len + 1):
            draft = self._drafter.propose(normed)
            slots = single_slots(seat, newest_index, max_length, draft, step, drafts)
            if step < self._max_draft_len:
                carried, normed = self._drafter.forward(draft, carried, slots, self._attention)


def store_drafts(state: SeatState, meta: StepMetadata, drafts: Tensor) -> None:
    """Make `drafts` int32 [N, K] those of the step's sampling rows, for the next step of their seats."""
    state.drafts.index_put_((meta.sample_seat,), drafts)
