"""What attention takes from a layer's input: projected, normalised and rotated queries, keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.models.layers.linear import packable
from tandem.models.layers.norms import rms_normalise
from tandem.models.layers.rotary import Rotary, rotate

# Steps of so few tokens are many; their buffers and the views of them are made once per size.
_MAX_KEPT_TOKENS = 32


class AttentionInputs(NamedTuple):
    """One step's tokens, split into heads; the index parts are there in block-sparse layers only.

    q [T, Hq, D], k and v [T, Hk, D], index_q [T, Hi, Di], index_k [T, Di], all in the model's type. Tokens may be
    strided: the parts can be views of one fused projection.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor | None
    index_k: Tensor | None


@dataclass(frozen=True)
class IndexBranch:
    """Sizes and norms of the index branch; norm weights are [dim] fp32, shared by all heads."""

    num_heads: int
    dim: int
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class HeadNorms:
    """Per-head norms of queries and keys; [head_dim] fp32, shared by all heads."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True)
class ProjectionGeometry:
    """How the rows of a fused projection weight are divided: q, k, v, then index_q and index_k if there is a branch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: HeadNorms | None
    """None leaves queries and keys as projected."""
    index: IndexBranch | None
    eps: float
    one_plus: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of each part, in order."""
        kv = self.num_kv_heads * self.head_dim
        main = (self.num_heads * self.head_dim, kv, kv)
        return main if self.index is None else (*main, self.index.num_heads * self.index.dim, self.index.dim)


class AttentionProjection(ABC):
    """One product with the fused weight [sum of widths, H], then a norm per head and the rotation of all but v."""

    @abstractmethod
    def __call__(self, x: Tensor, position: Tensor) -> AttentionInputs:
        """Return the attention inputs of the rows of `x` [T, H] at positions `position` [T] int32.

        They are valid until the next call of any projection of the same `Ops`.
        """


class ReferenceAttentionProjection(AttentionProjection):
    """AttentionProjection in torch operations; norm and rotation are one fp32 expression, rounded once."""

    def __init__(self, weight: Tensor, geometry: ProjectionGeometry, rotary: Rotary) -> None:
        self._weight = weight
        self._geometry = geometry
        self._rotary = rotary

    def __call__(self, x: Tensor, position: Tensor) -> AttentionInputs:
        """See `AttentionProjection`."""
        geometry = self._geometry
        cos, sin = self._rotary.cos[position], self._rotary.sin[position]
        parts = torch.split(torch.nn.functional.linear(x, self._weight), list(geometry.widths), dim=1)

        def turned(part: Tensor, dim: int, norm: Tensor | None) -> Tensor:
            heads = part.reshape(len(x), -1, dim).float()
            if norm is not None:
                heads = rms_normalise(heads, norm, geometry.eps, geometry.one_plus)
            return rotate(heads, cos, sin).to(x.dtype)

        norms = geometry.norms
        q = turned(parts[0], geometry.head_dim, norms.q if norms else None)
        k = turned(parts[1], geometry.head_dim, norms.k if norms else None)
        v = parts[2].reshape(len(x), -1, geometry.head_dim)
        index = geometry.index
        if index is None:
            return AttentionInputs(q, k, v, None, None)
        index_q = turned(parts[3], index.dim, index.q_norm)
        return AttentionInputs(q, k, v, index_q, turned(parts[4], index.dim, index.k_norm).squeeze(1))


class ProjectionBuffers:
    """Fused projection rows and their parts as views, shared by all layers of one geometry."""

    def __init__(self, geometry: ProjectionGeometry) -> None:
        self._widths = list(geometry.widths)
        self._head_dim = geometry.head_dim
        self._index_dim = None if geometry.index is None else geometry.index.dim
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, AttentionInputs]] = {}

    def rows_for(self, x: Tensor) -> tuple[Tensor, AttentionInputs]:
        """Return rows [T, sum of widths] for the tokens of `x` [T, H], in its type, and their parts."""
        key = (x.shape[0], x.dtype)
        buffers = self._kept.get(key)
        if buffers is None:
            buffers = self._make(x)
            if x.shape[0] <= _MAX_KEPT_TOKENS:
                self._kept[key] = buffers
        return buffers

    def _make(self, x: Tensor) -> tuple[Tensor, AttentionInputs]:
        num_tokens = x.shape[0]
        rows = x.new_empty((num_tokens, sum(self._widths)))
        parts = torch.split(rows, self._widths, dim=1)
        q, k, v = (part.view(num_tokens, -1, self._head_dim) for part in parts[:3])
        if self._index_dim is None:
            return rows, AttentionInputs(q, k, v, None, None)
        return rows, AttentionInputs(q, k, v, parts[3].view(num_tokens, -1, self._index_dim), parts[4])


class CpuAttentionProjection(AttentionProjection):
    """AttentionProjection on the CPU kernels: a packed product, then norms and rotation in place on the fused rows."""

    def __init__(
        self,
        weight: Tensor,
        geometry: ProjectionGeometry,
        rotary_dim: int,
        rope: cpu.RopeTable,
        buffers: ProjectionBuffers,
    ) -> None:
        self._packed = cpu.PackedLinear(*packable([weight]))
        self._buffers = buffers
        norms, index = geometry.norms, geometry.index
        q_norm, k_norm = (norms.q, norms.k) if norms else (None, None)
        starts = [0, *accumulate(geometry.widths)]
        parts = [
            (starts[0], geometry.num_heads, geometry.head_dim, rotary_dim, q_norm),
            (starts[1], geometry.num_kv_heads, geometry.head_dim, rotary_dim, k_norm),
        ]
        if index is not None:
            parts.append((starts[3], index.num_heads, index.dim, rotary_dim, index.q_norm))
            parts.append((starts[4], 1, index.dim, rotary_dim, index.k_norm))
        self._norm_rope = cpu.NormRope(parts, rope, geometry.eps, geometry.one_plus)

    def __call__(self, x: Tensor, position: Tensor) -> AttentionInputs:
        """See `AttentionProjection`."""
        rows, inputs = self._buffers.rows_for(x)
        cpu.project(self._packed, self._norm_rope, x, position, rows)
        return inputs
