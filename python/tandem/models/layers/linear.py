"""Matrix products without bias. A weight is [out, in], as in the checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core import cpu


class Linear(ABC):
    """Product with a fixed weight [N, K]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight^T, [T, N], for `x` [T, K], in the type of `x`; sums are kept in fp32."""


class ReferenceLinear(Linear):
    """Linear in torch operations."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        weight = self._weight if self._weight.dtype == x.dtype else self._weight.to(x.dtype)
        return torch.nn.functional.linear(x, weight)


def packable(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights in bf16 where that changes none of their values, else as they are.

    A checkpoint's bf16 matrices stay half as wide while activations are fp32. Kernels widen a weight as they read it
    and sum along the same chain, so not one bit of a result depends on this.
    """
    narrow = [weight.to(torch.bfloat16) for weight in weights]
    exact = all(torch.equal(mine.to(weight.dtype), weight) for mine, weight in zip(narrow, weights, strict=True))
    return narrow if exact else list(weights)


class CpuLinear(Linear):
    """Linear on the CPU kernels, from a packed copy of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = cpu.PackedLinear(*packable([weight]))
        self._num_outputs = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = x.new_empty((x.shape[0], self._num_outputs))
        cpu.linear(self._packed, x, out)
        return out
