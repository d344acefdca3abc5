"""What attention takes from a layer's input: projected, normalised and rotated queries, keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.models.layers.norms import rms_normalise
from tandem.models.layers.rotary import Rotation, rotate


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
    def __call__(self, x: Tensor, rotation: Rotation) -> AttentionInputs:
        """Return the attention inputs of the rows of `x` [T, H] at the positions of `rotation`."""


class ReferenceAttentionProjection(AttentionProjection):
    """AttentionProjection in torch operations; norm and rotation are one fp32 expression, rounded once."""

    def __init__(self, weight: Tensor, geometry: ProjectionGeometry) -> None:
        self._weight = weight
        self._geometry = geometry

    def __call__(self, x: Tensor, rotation: Rotation) -> AttentionInputs:
        """See `AttentionProjection`."""
        geometry = self._geometry
        parts = torch.split(torch.nn.functional.linear(x, self._weight), list(geometry.widths), dim=1)

        def turned(part: Tensor, dim: int, norm: Tensor | None) -> Tensor:
            heads = part.reshape(len(x), -1, dim).float()
            if norm is not None:
                heads = rms_normalise(heads, norm, geometry.eps, geometry.one_plus)
            return rotate(heads, rotation).to(x.dtype)

        norms = geometry.norms
        q = turned(parts[0], geometry.head_dim, norms.q if norms else None)
        k = turned(parts[1], geometry.head_dim, norms.k if norms else None)
        v = parts[2].reshape(len(x), -1, geometry.head_dim)
        index = geometry.index
        if index is None:
            return AttentionInputs(q, k, v, None, None)
        index_q = turned(parts[3], index.dim, index.q_norm)
        return AttentionInputs(q, k, v, index_q, turned(parts[4], index.dim, index.k_norm).squeeze(1))
