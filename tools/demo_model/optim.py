"""Muon for the matrices, AdamW for embedding, head, norms and router, and the schedule of both."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tools.demo_model.model import Weights

MATRICES = ("q", "k", "v", "o", "index_q", "index_k", "gate", "up", "down", "w1", "w2", "w3")
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.97)
BALANCE_STEP = 0.002
WARMUP_STEPS = 100
FLAT_UNTIL = 0.4


def lr_factor(step: int, progress: float) -> float:
    """Return the multiple of the base rates: a short warm-up, flat, then linear to 0 at progress 1."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.0, 1.0 - progress) / (1.0 - FLAT_UNTIL))


def orthogonalize(update: Tensor, iterations: int = 5) -> Tensor:
    """Return the nearest orthogonal matrices, roughly, of a batch [..., m, n], by a quintic Newton-Schulz iteration.

    The coefficients are those of Keller Jordan's Muon: they lift small singular values fast and leave all near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


@dataclass(frozen=True)
class Rates:
    """Base learning rates of the two sorts of parameters."""

    muon: float
    adam: float


TARGET_RATES = Rates(muon=0.02, adam=4e-3)


class Optimizer:
    """Updates all weights of a module in place from their gradients; `matrices` names those that Muon updates."""

    def __init__(self, weights: nn.Module, matrices: Collection[str], rates: Rates) -> None:
        named = dict(weights.named_parameters())
        self._rates = rates
        self._matrices = [named[name] for name in matrices]
        self._momentum = [torch.zeros_like(matrix) for matrix in self._matrices]
        rest = [parameter for name, parameter in named.items() if name not in matrices]
        self._adam = torch.optim.AdamW(rest, lr=rates.adam, betas=ADAM_BETAS, weight_decay=0.0, fused=rest[0].is_cuda)
        self._parameters = list(named.values())

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply one update at `factor` times the base rates."""
        for matrix, momentum in zip(self._matrices, self._momentum, strict=True):
            gradient = matrix.grad
            assert gradient is not None
            momentum.lerp_(gradient, 1.0 - MUON_MOMENTUM)
            update = orthogonalize(gradient.lerp(momentum, MUON_MOMENTUM))
            scale = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
            matrix.add_(update, alpha=-self._rates.muon * factor * scale)
        for group in self._adam.param_groups:
            group["lr"] = self._rates.adam * factor
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None


@torch.no_grad()
def balance_experts(weights: Weights, factor: float, expert_counts: Tensor) -> None:
    """Move the router bias by a fixed step towards an even load, as loss-free balancing does.

    `expert_counts` [sparse layers, E] are the step's tokens.
    """
    error = expert_counts.mean(-1, keepdim=True) - expert_counts
    weights.router_bias.add_(torch.sign(error), alpha=BALANCE_STEP * factor)
