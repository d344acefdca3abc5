"""Gated MLPs: down(activation(gate(x), up(x)))."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.models.layers.linear import packable


@dataclass(frozen=True)
class SwigluOai:
    """g' sigmoid(alpha g') (u' + 1) with g' = min(g, limit), u' = clamp(u, -limit, limit)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of `gate` and `up` (same shape, fp32)."""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1.0)


@dataclass(frozen=True)
class Silu:
    """g sigmoid(g) u."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of `gate` and `up` (same shape, fp32)."""
        return torch.nn.functional.silu(gate) * up


Activation = SwigluOai | Silu


class GatedMlp(ABC):
    """A gated MLP with weights gate and up [I, H], concatenated in this order to [2I, H], and down [H, I]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the MLP of the rows of `x` [T, H], in the type of `x`."""


class ReferenceGatedMlp(GatedMlp):
    """GatedMlp in torch operations; the activation is computed in fp32 and rounded once."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """See `GatedMlp`."""
        gate, up = torch.nn.functional.linear(x, self._gate_up).float().chunk(2, dim=-1)
        return torch.nn.functional.linear(self._activation(gate, up).to(x.dtype), self._down)


class CpuGatedMlp(GatedMlp):
    """GatedMlp on the CPU kernels, from a packed copy of the weights; fp32 from input to output, rounded once."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        gate_up, down = packable([gate_up, down])
        self._packed = cpu.PackedExperts([], [], (gate_up, down))
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """See `GatedMlp`."""
        out = torch.empty_like(x)
        activation = self._activation
        if isinstance(activation, SwigluOai):
            cpu.moe(self._packed, x, None, None, activation.limit, activation.alpha, out)
        else:
            cpu.moe_silu(self._packed, x, None, None, out)
        return out
