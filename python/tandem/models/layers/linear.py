"""Matrix products without bias. A weight is [out, in], as in the checkpoint."""

from abc import ABC, abstractmethod

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


class CpuLinear(Linear):
    """Linear on the CPU kernels, from a packed copy of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = cpu.PackedLinear(weight)
        self._num_outputs = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = x.new_empty((x.shape[0], self._num_outputs))
        cpu.linear(self._packed, x, out)
        return out
