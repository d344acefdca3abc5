"""The implementations of the layers: which classes a model is built from, chosen once when it is built."""

from abc import ABC, abstractmethod

from torch import Tensor

from tandem.core import cpu
from tandem.models.layers.attention import (
    AttentionProjection,
    CpuAttentionProjection,
    ProjectionBuffers,
    ProjectionGeometry,
    ReferenceAttentionProjection,
)
from tandem.models.layers.linear import CpuLinear, Linear, ReferenceLinear
from tandem.models.layers.mlp import Activation, CpuGatedMlp, GatedMlp, ReferenceGatedMlp, SwigluOai
from tandem.models.layers.moe import CpuMoe, Moe, MoeWeights, ReferenceMoe, Routing
from tandem.models.layers.norms import CpuRmsNorm, ReferenceRmsNorm, RmsNorm
from tandem.models.layers.rotary import Rotary


class Ops(ABC):
    """Builds layers of one implementation. A layer takes over the tensors given to it and may repack them.

    Attributes:
        kernels_only: whether the layers compute with kernels of `tandem.core.cpu` alone, which a tape can record.
    """

    kernels_only = False

    @abstractmethod
    def linear(self, weight: Tensor) -> Linear:
        """Return the product with `weight` [N, K]."""

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float, one_plus: bool) -> RmsNorm:
        """Return the norm with `weight` [N] fp32."""

    @abstractmethod
    def attention_projection(self, weight: Tensor, geometry: ProjectionGeometry, rotary: Rotary) -> AttentionProjection:
        """Return the projection with the fused `weight` [sum of widths, H], rotating by `rotary`."""

    @abstractmethod
    def gated_mlp(self, gate_up: Tensor, down: Tensor, activation: Activation) -> GatedMlp:
        """Return the MLP with `gate_up` [2I, H] and `down` [H, I]."""

    @abstractmethod
    def moe(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> Moe:
        """Return the mixture of experts with `weights`."""


class ReferenceOps(Ops):
    """Plain torch: slow, obviously right, the measure of every other implementation."""

    def linear(self, weight: Tensor) -> Linear:
        """See `Ops.linear`."""
        return ReferenceLinear(weight)

    def rms_norm(self, weight: Tensor, eps: float, one_plus: bool) -> RmsNorm:
        """See `Ops.rms_norm`."""
        return ReferenceRmsNorm(weight, eps, one_plus)

    def attention_projection(self, weight: Tensor, geometry: ProjectionGeometry, rotary: Rotary) -> AttentionProjection:
        """See `Ops.attention_projection`."""
        return ReferenceAttentionProjection(weight, geometry, rotary)

    def gated_mlp(self, gate_up: Tensor, down: Tensor, activation: Activation) -> GatedMlp:
        """See `Ops.gated_mlp`."""
        return ReferenceGatedMlp(gate_up, down, activation)

    def moe(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> Moe:
        """See `Ops.moe`."""
        return ReferenceMoe(weights, routing, activation)


class CpuOps(Ops):
    """The CPU kernels: weights packed once; results do not depend on what else is in a step, nor on threads."""

    kernels_only = True

    def __init__(self) -> None:
        self._rope_tables: dict[Rotary, cpu.RopeTable] = {}
        self._projection_buffers: dict[tuple[int, ...], ProjectionBuffers] = {}

    def linear(self, weight: Tensor) -> Linear:
        """See `Ops.linear`."""
        return CpuLinear(weight)

    def rms_norm(self, weight: Tensor, eps: float, one_plus: bool) -> RmsNorm:
        """See `Ops.rms_norm`."""
        return CpuRmsNorm(weight, eps, one_plus)

    def attention_projection(self, weight: Tensor, geometry: ProjectionGeometry, rotary: Rotary) -> AttentionProjection:
        """See `Ops.attention_projection`."""
        if rotary not in self._rope_tables:
            self._rope_tables[rotary] = cpu.RopeTable(rotary.cos, rotary.sin)
        shape = (geometry.head_dim, *geometry.widths)
        buffers = self._projection_buffers.setdefault(shape, ProjectionBuffers(geometry))
        return CpuAttentionProjection(weight, geometry, rotary.rotary_dim, self._rope_tables[rotary], buffers)

    def gated_mlp(self, gate_up: Tensor, down: Tensor, activation: Activation) -> GatedMlp:
        """See `Ops.gated_mlp`."""
        return CpuGatedMlp(gate_up, down, activation)

    def moe(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> Moe:
        """See `Ops.moe`."""
        return CpuMoe(weights, routing, activation)
