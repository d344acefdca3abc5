"""The attention interface: store a step's keys and values in the pages, choose blocks, attend through the pages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.core import layout as core_layout
from tandem.msa.geometry import GeometryError, LayerGeometry, SparseGeometry
from tandem.msa.limits import Limits
from tandem.msa.state import SeatState
from tandem.msa.tiles import torch_dtype


class AttendedTokens(Protocol):
    """Which cache entries each of T tokens writes and sees; `StepMetadata` is one. All tensors int32 [T]."""

    @property
    def token_seat(self) -> Tensor:
        """Seat of each token."""

    @property
    def write_index(self) -> Tensor:
        """Index at which the token's entries are stored, -1 for nowhere."""

    @property
    def kv_len(self) -> Tensor:
        """Keys that the token sees are those at indices below it; 0 sees none."""


@dataclass(frozen=True)
class CachedLayer:
    """A layer's geometry with the views of its tiles; `index_k` is None for a layer of full attention."""

    geometry: LayerGeometry
    k: core_layout.View
    v: core_layout.View
    index_k: core_layout.View | None

    @property
    def sparse(self) -> SparseGeometry:
        """How the layer selects blocks. Raises `GeometryError` for a layer of full attention."""
        if self.geometry.sparse is None:
            raise GeometryError(f"layer {self.geometry.layer} has full attention and selects no blocks")
        return self.geometry.sparse

    @property
    def index_keys(self) -> core_layout.View:
        """View of the index keys. Raises `GeometryError` for a layer of full attention."""
        if self.index_k is None:
            raise GeometryError(f"layer {self.geometry.layer} has full attention and no index keys")
        return self.index_k


class AttentionBackend(ABC):
    """Attention over one pool. Backends are interchangeable: the same calls give the same results to rounding.

    Every token attends through the cache, its own key included, never through the tensors of the step; so `write`
    comes before `select` and `attend` of the same layer.

    Attributes:
        kernels_only: whether the calls compute with kernels of `tandem.core.cpu` alone, which a tape can record.
    """

    kernels_only = False

    def __init__(
        self,
        layout: core_layout.CacheLayout,
        pool: Tensor,
        limits: Limits,
        state: SeatState,
        geometry: Sequence[LayerGeometry],
        *,
        tokens_per_page: int | None = None,
    ) -> None:
        """Checks that the parts fit together and resolves every view.

        Args:
            layout: the cache's layout.
            pool: uint8 [limits.num_slots * layout.slot_bytes], contiguous, aligned for every element type.
            limits: bounds of the engine.
            state: seats whose block table names the slots.
            geometry: one entry for each attention layer that this backend serves.
            tokens_per_page: page size of the views, which must divide the layout's; the layout's own if None.

        Raises `GeometryError`, `ElementTypeError` or `tandem.core.InvalidArgument` naming both values that disagree.
        """
        if layout.tokens_per_page != limits.tokens_per_page:
            raise GeometryError(
                f"the layout has {layout.tokens_per_page} tokens per page, the limits {limits.tokens_per_page}"
            )
        pool_bytes = limits.num_slots * layout.slot_bytes
        if pool.dtype != torch.uint8 or pool.shape != (pool_bytes,) or not pool.is_contiguous():
            raise GeometryError(
                f"the pool is {pool.dtype} {tuple(pool.shape)}, needed are {limits.num_slots} slots of "
                f"{layout.slot_bytes} bytes: torch.uint8 ({pool_bytes},), contiguous"
            )
        self.layout = layout
        self.pool = pool
        self.limits = limits
        self.state = state
        self.layers = {entry.layer: self._resolve(layout, entry, tokens_per_page) for entry in geometry}

    @staticmethod
    def _resolve(layout: core_layout.CacheLayout, entry: LayerGeometry, tokens_per_page: int | None) -> CachedLayer:
        k = layout.view(entry.layer, core_layout.Role.K, tokens_per_page)
        v = layout.view(entry.layer, core_layout.Role.V, tokens_per_page)
        if entry.num_q_heads % k.heads != 0:
            raise GeometryError(
                f"layer {entry.layer}: {entry.num_q_heads} query heads are no multiple of {k.heads} KV heads"
            )
        index_k = None
        if entry.sparse is not None:
            if entry.sparse.block_size != layout.tokens_per_page:
                raise GeometryError(
                    f"layer {entry.layer}: MSA block size {entry.sparse.block_size} is not the page size of "
                    f"{layout.tokens_per_page} tokens; a block is one page"
                )
            index_k = layout.view(entry.layer, core_layout.Role.INDEX_K, tokens_per_page)
        for view in (k, v) if index_k is None else (k, v, index_k):
            torch_dtype(view.dtype)
        return CachedLayer(entry, k, v, index_k)

    def layer(self, layer: int) -> CachedLayer:
        """The resolved layer. Raises `GeometryError` for one that the backend was not built for."""
        cached = self.layers.get(layer)
        if cached is None:
            raise GeometryError(f"layer {layer} has no attention geometry here, known are {sorted(self.layers)}")
        return cached

    def parts(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None) -> list[tuple[core_layout.View, Tensor]]:
        """Pairs each of a layer's views with the rows to store there. Raises as `write` does."""
        cached = self.layer(layer)
        if index_k is None:
            if cached.index_k is not None:
                raise GeometryError(f"layer {layer} has sparse attention and was written no index keys")
            return [(cached.k, k), (cached.v, v)]
        if cached.index_k is None:
            raise GeometryError(f"layer {layer} has full attention and was written with index keys")
        return [(cached.k, k), (cached.v, v), (cached.index_k, index_k)]

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:
        """Stores entries at each token's `write_index`; -1 changes no byte.

        Args:
            layer: layer id.
            k, v: [T, num_kv_heads, dim], rows may be strided.
            index_k: [T, index dim], rows may be strided; None for a layer of full attention.
            tokens: where to write.

        Raises `GeometryError` where `index_k` is given for a layer that has none, or missing for one that has.
        """

    @abstractmethod
    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:
        """Chooses the blocks that each token attends, per index head.

        A block's score is the largest raw dot product of the token's index query with the index keys of the block
        that it sees. The `num_local` newest blocks count as +inf. The `topk` highest are chosen, the lower id first
        where scores are equal.

        Args:
            layer: a sparse layer's id.
            index_q: [T, index heads, index dim].
            tokens: what each token sees.

        Returns: int32 [T, index heads, topk], ids ascending, then -1.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:
        """Causal softmax attention through the pages, in fp32.

        Args:
            layer: layer id.
            q: [T, num_q_heads, dim], rows may be strided.
            blocks: int32 [T, num_kv_heads, topk] as from `select`; None attends everything visible.
            tokens: what each token sees.

        Returns: [T, num_q_heads, dim] of q's dtype; zeros where a token sees nothing.
        """
