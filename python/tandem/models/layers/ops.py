"""The implementations of the layers: which classes a model is built from, chosen once when it is built."""

from abc import ABC, abstractmethod

from torch import Tensor

from tandem.models.layers.attention import AttentionProjection, ProjectionGeometry, ReferenceAttentionProjection
from tandem.models.layers.linear import Linear, ReferenceLinear
from tandem.models.layers.mlp import Activation, GatedMlp, ReferenceGatedMlp, SwigluOai
from tandem.models.layers.moe import Moe, MoeWeights, ReferenceMoe, Routing
from tandem.models.layers.norms import ReferenceRmsNorm, RmsNorm


class Ops(ABC):
    """Builds layers of one implementation. A layer takes over the tensors given to it and may repack them."""

    @abstractmethod
    def linear(self, weight: Tensor) -> Linear:
        """Return the product with `weight` [N, K]."""

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float, one_plus: bool) -> RmsNorm:
        """Return the norm with `weight` [N] fp32."""

    @abstractmethod
    def attention_projection(self, weight: Tensor, geometry: ProjectionGeometry) -> AttentionProjection:
        """Return the projection with the fused `weight` [sum of widths, H]."""

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

    def attention_projection(self, weight: Tensor, geometry: ProjectionGeometry) -> AttentionProjection:
        """See `Ops.attention_projection`."""
        return ReferenceAttentionProjection(weight, geometry)

    def gated_mlp(self, gate_up: Tensor, down: Tensor, activation: Activation) -> GatedMlp:
        """See `Ops.gated_mlp`."""
        return ReferenceGatedMlp(gate_up, down, activation)

    def moe(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> Moe:
        """See `Ops.moe`."""
        return ReferenceMoe(weights, routing, activation)
