"""Mixture of experts: a sigmoid router whose bias steers the choice only, routed experts, and one that always runs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core import cpu
from tandem.models.layers.linear import packable
from tandem.models.layers.mlp import ReferenceGatedMlp, SwigluOai


@dataclass(frozen=True)
class MoeWeights:
    """Weights of one mixture: E routed experts of width I, one shared expert of width S, hidden size H.

    `gate` [E, H] and `bias` [E] are fp32 whatever the model's type: the choice of experts must not depend on it.
    `gate_up[e]` is [2I, H], gate first, and `down[e]` [H, I]; `shared_gate_up` [2S, H], `shared_down` [H, S].
    """

    gate: Tensor
    bias: Tensor
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    shared_gate_up: Tensor
    shared_down: Tensor


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen: the `num_selected` highest scores; their sum is multiplied by `scale`."""

    num_selected: int
    scale: float


class Moe(ABC):
    """scale * sum_i w_i Expert_i(x) + Shared(x), with p = sigmoid(gate @ x) in fp32.

    The experts i are the `num_selected` highest p + bias, of equal ones the lower index; w_i = p_i / sum of selected p.
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the mixture's output for the rows of `x` [T, H], in the type of `x`."""


def route(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the experts [T, n] int64 of each row of `x` and their weights [T, n] fp32, the routing scale included."""
    scores = torch.sigmoid(torch.nn.functional.linear(x.float(), gate))
    # A stable sort puts the lower expert first among equals, which topk does not promise.
    experts = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, : routing.num_selected]
    chosen = scores.gather(1, experts)
    return experts, chosen / chosen.sum(-1, keepdim=True) * routing.scale


class ReferenceMoe(Moe):
    """Moe in torch operations, expert by expert; the weighted sum is kept in fp32 and rounded once."""

    def __init__(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> None:
        self._gate = weights.gate
        self._bias = weights.bias
        self._routing = routing
        self._experts = [
            ReferenceGatedMlp(gate_up, down, activation)
            for gate_up, down in zip(weights.gate_up, weights.down, strict=True)
        ]
        self._shared = ReferenceGatedMlp(weights.shared_gate_up, weights.shared_down, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Moe`."""
        experts, weights = route(x, self._gate, self._bias, self._routing)
        out = self._shared(x).float()
        for index, expert in enumerate(self._experts):
            tokens, place = torch.where(experts == index)
            if len(tokens):
                out.index_add_(0, tokens, expert(x[tokens]).float() * weights[tokens, place].unsqueeze(1))
        return out.to(x.dtype)


class CpuMoe(Moe):
    """Moe on the CPU kernels, from packed copies of the experts; fp32 from input to output, rounded once."""

    def __init__(self, weights: MoeWeights, routing: Routing, activation: SwigluOai) -> None:
        self._gate = weights.gate
        self._bias = weights.bias
        self._routing = routing
        self._activation = activation
        shared = [weights.shared_gate_up, weights.shared_down]
        packable_weights = packable([*weights.gate_up, *weights.down, *shared])
        count = len(weights.gate_up)
        gate_up, down, last = packable_weights[:count], packable_weights[count:-2], packable_weights[-2:]
        self._packed = cpu.PackedExperts(gate_up, down, (last[0], last[1]))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Moe`."""
        out = torch.empty_like(x)
        routing, activation = self._routing, self._activation
        cpu.routed_moe(
            self._packed,
            x,
            self._gate,
            self._bias,
            routing.num_selected,
            routing.scale,
            activation.limit,
            activation.alpha,
            out,
        )
        return out
