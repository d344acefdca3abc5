"""Root-mean-square normalisation, plain (x * w) and Gemma style (x * (1 + w))."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tandem.core import cpu


def rms_normalise(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight) over the last axis, in fp32 without rounding.

    `x` is [..., N] of any float type, `weight` [N] fp32. The 1 is added in fp32, since bf16 could not hold the sum.
    """
    x = x.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * scale * (weight + 1.0 if one_plus else weight)


class RmsNorm(ABC):
    """Normalises rows: computed in fp32, rounded once at the end to the type of the input."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the normalised rows of `x` [T, N], in `out` of its shape and type or as a new tensor."""

    @abstractmethod
    def add(self, update: Tensor, residual: Tensor) -> Tensor:
        """Add `update` to `residual` in place (both [T, N]) and return the normalised sum as a new tensor."""


class ReferenceRmsNorm(RmsNorm):
    """RmsNorm in torch operations."""

    def __init__(self, weight: Tensor, eps: float, one_plus: bool) -> None:
        self._weight = weight
        self._eps = eps
        self._one_plus = one_plus

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `RmsNorm`."""
        normalised = rms_normalise(x, self._weight, self._eps, self._one_plus).to(x.dtype)
        return normalised if out is None else out.copy_(normalised)

    def add(self, update: Tensor, residual: Tensor) -> Tensor:
        """See `RmsNorm.add`."""
        residual.add_(update)
        return self(residual)


class CpuRmsNorm(RmsNorm):
    """RmsNorm on the CPU kernels."""

    def __init__(self, weight: Tensor, eps: float, one_plus: bool) -> None:
        self._weight = weight
        self._eps = eps
        self._one_plus = one_plus

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `RmsNorm`."""
        out = torch.empty_like(x) if out is None else out
        cpu.rms_norm(x, self._weight, self._eps, self._one_plus, out)
        return out

    def add(self, update: Tensor, residual: Tensor) -> Tensor:
        """See `RmsNorm.add`."""
        out = torch.empty_like(residual)
        cpu.add_rms_norm(update, residual, self._weight, self._eps, self._one_plus, out)
        return out
