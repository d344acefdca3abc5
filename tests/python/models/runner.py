"""One sequence through a model, without an engine: its own pool, block table and steps."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.core import layout
from tandem.models import MiniMaxM3, attention_geometry, tile_specs
from tandem.msa import AttentionBackend, Limits, PlanRows, RowKind, SeatState, StepMetadata, derive

_SEAT = 1


class Runner:
    """Feeds one sequence in steps of any size. Unused cache memory is NaN, pages lie in slots in a shuffled order."""

    def __init__(
        self,
        model: MiniMaxM3,
        backend: type[AttentionBackend],
        max_tokens: int,
        kv_dtype: layout.ElementType = layout.ElementType.FP32,
    ) -> None:
        config = model.config
        num_pages = -(-max_tokens // config.block_size)
        self.model = model
        self.limits = Limits(
            max_seats=2,
            max_tokens=max_tokens,
            max_rows=2,
            max_model_len=max_tokens,
            tokens_per_page=config.block_size,
            max_pages=num_pages,
            max_draft_len=0,
            num_slots=num_pages + 3,
        )
        cache = layout.CacheLayout(tile_specs(config, kv_dtype), config.block_size)
        pool = torch.full((self.limits.num_slots * cache.slot_bytes,), 0xFF, dtype=torch.uint8)
        self.state = SeatState(self.limits)
        self.meta = StepMetadata(self.limits)
        self.backend = backend(cache, pool, self.limits, self.state, attention_geometry(config))
        order = np.random.default_rng(0).permutation(self.limits.num_slots)[:num_pages]
        self.state.block_table[_SEAT, :num_pages] = torch.from_numpy(order.astype(np.int32))
        self.num_tokens = 0

    def feed(self, ids: Sequence[int], capture: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run the next tokens of the sequence in one step; return their logits [T, V] and the captured states."""
        derive(self._row(ids), self.state, self.meta)
        hidden, captured = self.model.forward(self.meta.token_ids, self.meta, self.backend, capture)
        self.num_tokens += len(ids)
        self.state.length[_SEAT] = self.num_tokens
        return self.model.logits(hidden), captured

    def greedy(self, token: int, num_steps: int) -> Iterator[tuple[int, Tensor]]:
        """Feed `token`, then each argmax, one a step; yield each argmax with its logits [V]."""
        for _ in range(num_steps):
            self.state.last_token[_SEAT] = token
            logits = self.feed([token])[0][0]
            token = int(logits.argmax())
            yield token, logits

    def _row(self, ids: Sequence[int]) -> PlanRows:
        def line(value: int, dtype: type = np.int32) -> np.ndarray:
            return np.array([value], dtype=dtype)

        # A single token takes the way of a decode row, whose id comes from the seat.
        decode = self.num_tokens > 0 and len(ids) == 1 and int(self.state.last_token[_SEAT]) == ids[0]
        listed = [] if decode else [*ids, -1]
        return PlanRows(
            seat=line(_SEAT),
            kind=line(RowKind.DECODE if decode else RowKind.CONTEXT),
            first_index=line(self.num_tokens),
            query_len=line(len(ids)),
            write_from=line(0),
            num_drafts=line(0),
            max_length=line(self.limits.max_model_len),
            samples=line(1, np.uint8),
            fresh=line(self.num_tokens == 0, np.uint8),
            token_offsets=np.array([0, len(listed)], dtype=np.int32),
            token_ids=np.array(listed, dtype=np.int32),
            table_changes=np.zeros((0, 3), dtype=np.int32),
        )
