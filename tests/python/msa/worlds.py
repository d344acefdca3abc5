"""A small paged cache with known content, beside the same content as plain arrays.

A world has two layers: 0 with full attention, 1 block-sparse. Each sequence's history is written byte by byte through
`View.offset`, so that nothing under test places it. Everything else in the pool is poison.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor

from tandem.core import layout as core_layout
from tandem.msa import (
    AttentionBackend,
    CpuBackend,
    LayerGeometry,
    Limits,
    PlanRows,
    ReferenceBackend,
    SeatState,
    SparseGeometry,
    StepMetadata,
    derive,
    tile_tensor,
)

BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceBackend, "cpu": CpuBackend}
DENSE, SPARSE = 0, 1
DTYPES = {core_layout.ElementType.FP32: torch.float32, core_layout.ElementType.BF16: torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a world's model and cache."""

    page: int = 4
    topk: int = 2
    num_local: int = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 32
    element: core_layout.ElementType = core_layout.ElementType.FP32
    placement: str = "fragmented"
    poison: float = float("nan")
    max_model_len: int = 64
    num_seats: int = 4
    max_draft_len: int = 3
    first_index_attended: int = 0

    @property
    def geometry(self) -> list[LayerGeometry]:
        sparse = SparseGeometry(self.page, self.topk, self.num_local)
        return [
            LayerGeometry(DENSE, self.num_q_heads, self.dim**-0.5, None, self.first_index_attended),
            LayerGeometry(SPARSE, self.num_q_heads, self.dim**-0.5, sparse),
        ]


@dataclass
class Entries:
    """What one sequence holds in one layer: k, v [n, Hk, D] and index_k [n, Di], as rounded in the cache."""

    k: Tensor
    v: Tensor
    index_k: Tensor

    def __getitem__(self, part: slice) -> "Entries":
        return Entries(self.k[part], self.v[part], self.index_k[part])

    def then(self, other: "Entries") -> "Entries":
        return Entries(*(torch.cat([mine, new]) for mine, new in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k, self.v, self.index_k


@dataclass
class Queries:
    """A step's queries in one layer: q [T, Hq, D], index_q [T, Hk, Di]."""

    q: Tensor
    index_q: Tensor


@dataclass
class World:
    """One pool with its seats; `truth[layer][seat]` is what a sequence's history holds."""

    shape: Shape
    seed: int = 0
    limits: Limits = field(init=False)
    layout: core_layout.CacheLayout = field(init=False)
    pool: Tensor = field(init=False)
    state: SeatState = field(init=False)
    truth: dict[int, dict[int, Entries]] = field(init=False)
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        pages = -(-shape.max_model_len // shape.page)
        self.limits = Limits(
            max_seats=shape.num_seats,
            max_tokens=shape.num_seats * shape.max_model_len,
            max_rows=shape.num_seats + 2,
            max_model_len=shape.max_model_len,
            tokens_per_page=shape.page,
            max_pages=pages,
            max_draft_len=shape.max_draft_len,
            num_slots=shape.num_seats * pages + 3,
        )
        tiles = [
            core_layout.TileSpec(layer, role, shape.element, shape.num_kv_heads, shape.dim)
            for layer in (DENSE, SPARSE)
            for role in (core_layout.Role.K, core_layout.Role.V)
        ]
        tiles.append(
            core_layout.TileSpec(SPARSE, core_layout.Role.INDEX_K, shape.element, 1, shape.dim, replicated=True)
        )
        self.layout = core_layout.CacheLayout(tiles, shape.page)
        self.pool = poisoned_pool(self.layout, self.limits.num_slots, shape)
        self.state = SeatState(self.limits)
        slots = list(range(self.limits.num_slots))
        if shape.placement == "reversed":
            slots.reverse()
        elif shape.placement == "fragmented":
            Random(self.seed).shuffle(slots)
        table = torch.tensor(slots[: shape.num_seats * pages], dtype=torch.int32)
        # Neighbouring pages of one sequence lie a seat apart, so that they are never adjacent in the pool.
        self.state.block_table[: shape.num_seats] = table.view(pages, shape.num_seats).T
        self.random = torch.Generator().manual_seed(self.seed)
        empty = self.entries(0)
        self.truth = {layer: dict.fromkeys(range(shape.num_seats), empty) for layer in (DENSE, SPARSE)}

    def numbers(self, *size: int) -> Tensor:
        """Normal numbers, rounded to the cache's element type."""
        return torch.randn(size, generator=self.random).to(DTYPES[self.shape.element])

    def entries(self, count: int) -> Entries:
        heads, dim = self.shape.num_kv_heads, self.shape.dim
        return Entries(self.numbers(count, heads, dim), self.numbers(count, heads, dim), self.numbers(count, dim))

    def queries(self, count: int) -> Queries:
        dim = self.shape.dim
        return Queries(
            self.numbers(count, self.shape.num_q_heads, dim), self.numbers(count, self.shape.num_kv_heads, dim)
        )

    def remember(self, seat: int, count: int) -> None:
        """Gives a sequence a random history of `count` tokens in both layers."""
        for layer in (DENSE, SPARSE):
            self.store(layer, seat, self.entries(count))
        self.state.length[seat] = count

    def store(self, layer: int, seat: int, entries: Entries) -> None:
        """Writes a history from index 0 on, one token and head at a time."""
        self.truth[layer][seat] = entries
        roles = [(core_layout.Role.K, entries.k), (core_layout.Role.V, entries.v)]
        if layer == SPARSE:
            roles.append((core_layout.Role.INDEX_K, entries.index_k.unsqueeze(1)))
        data = self.pool.numpy()
        for role, rows in roles:
            view = self.layout.view(layer, role)
            raw = rows.contiguous().view(torch.uint8).numpy()
            for index in range(rows.shape[0]):
                slot = int(self.state.block_table[seat, index // self.shape.page])
                for head in range(rows.shape[1]):
                    start = view.offset(slot, head, 0, index % self.shape.page)
                    data[start : start + raw.shape[2]] = raw[index, head]

    def backend(self, name: str, tokens_per_page: int | None = None) -> AttentionBackend:
        return BACKENDS[name](
            self.layout,
            self.pool,
            self.limits,
            self.state,
            self.shape.geometry,
            tokens_per_page=tokens_per_page,
        )

    def metadata(self, rows: PlanRows, **padding: int) -> StepMetadata:
        meta = StepMetadata(self.limits)
        derive(rows, self.state, meta, **padding)
        return meta

    def written_bytes(self, seats_and_indices: Sequence[tuple[int, int]], layer: int) -> np.ndarray:
        """bool [pool bytes]: which bytes a step that writes these (seat, index) in a layer may change."""
        touched = np.zeros(self.pool.numel(), dtype=bool)
        roles = [core_layout.Role.K, core_layout.Role.V] + ([core_layout.Role.INDEX_K] if layer == SPARSE else [])
        for role in roles:
            view: core_layout.View = self.layout.view(layer, role)
            for seat, index in seats_and_indices:
                slot = int(self.state.block_table[seat, index // self.shape.page])
                for head in range(view.heads):
                    start = view.offset(slot, head, 0, index % self.shape.page)
                    touched[start : start + view.row_bytes] = True
        return touched


def poisoned_pool(layout: core_layout.CacheLayout, num_slots: int, shape: Shape) -> Tensor:
    """A pool in which every tile holds the poison and the padding between tiles holds ones."""
    pool = torch.full((num_slots * layout.slot_bytes,), 255, dtype=torch.uint8)
    for spec in layout.tiles:
        tile_tensor(pool, layout.view(spec.layer, spec.role), num_slots).fill_(shape.poison)
    return pool


def true_blocks(index_q: Tensor, index_k: Tensor, kv_len: int, shape: Shape) -> list[tuple[list[int], float]]:
    """Per index head of one token: the chosen blocks, and by how much the last choice was better than the next one.

    `index_q` [Hi, Di]; `index_k` [n, Di]. One block at a time, in double precision.
    """
    chosen = []
    for head in range(index_q.shape[0]):
        scores = (index_k[:kv_len].double() @ index_q[head].double()).tolist()
        num_blocks = -(-kv_len // shape.page)
        best = [max(scores[block * shape.page : (block + 1) * shape.page]) for block in range(num_blocks)]
        for block in range(max(0, num_blocks - shape.num_local), num_blocks):
            best[block] = float("inf")
        order = sorted(range(num_blocks), key=lambda block: (-best[block], block))
        gap = float("inf") if num_blocks <= shape.topk else best[order[shape.topk - 1]] - best[order[shape.topk]]
        chosen.append((sorted(order[: shape.topk]), gap))
    return chosen


def true_attention(
    q: Tensor, entries: Entries, kv_len: int, blocks: list[list[int]] | None, shape: Shape, first: int = 0
) -> Tensor:
    """One token's attention [Hq, D] in double precision over the plain arrays; `blocks` per KV head."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = shape.num_q_heads // shape.num_kv_heads
    for kv_head in range(shape.num_kv_heads):
        pages = range(-(-kv_len // shape.page)) if blocks is None else blocks[kv_head]
        seen = [j for page in pages for j in range(page * shape.page, (page + 1) * shape.page) if first <= j < kv_len]
        if seen:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = q[heads].double() @ entries.k[seen, kv_head].double().T * shape.dim**-0.5
            out[heads] = scores.softmax(dim=1) @ entries.v[seen, kv_head].double()
    return out
