"""Steps of few tokens as tapes: the kernel calls of a forward pass, recorded once per shape, then made in one call.

A decode step of a small model makes some eighty short calls, and the interpreter between them, its code and data cold
after each kernel went through its weights, took up to half of the time.
A replay makes the same calls on the same memory, so it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.core import cpu
from tandem.msa import AttentionBackend

# Tokens of a step from which on the calls are so long that nothing is gained.
MAX_TAPED_TOKENS = 32
# What a tape reads and writes stays allocated; shapes that come back are few.
_MAX_TAPES = 64

_aten = torch.ops.aten
# These allocate memory or say how it is looked at; they compute nothing that a replay would miss.
_SHAPING = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.view.default,
        _aten.flatten.using_ints,
        _aten.split_with_sizes.default,
        _aten.split.Tensor,
        _aten.slice.Tensor,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
    }
)


class NotAKernelError(RuntimeError):
    """A torch operation ran while a tape recorded; the message names it. A replay would have missed it."""


class Tapes:
    """Tapes of one model's passes, by key."""

    def __init__(self) -> None:
        self._taped: dict[Hashable, tuple[cpu.Tape, Tensor]] = {}

    def begin_pass(self, num_tapes: int) -> None:
        """Make room for the tapes of a pass, by forgetting all others.

        A tape reads what the one before it in its pass has written, so those of a pass are forgotten together.
        """
        if len(self._taped) + num_tapes > _MAX_TAPES:
            self._taped.clear()

    def run(self, key: Hashable, calls: Callable[[], Tensor]) -> Tensor:
        """Make the kernel calls of `calls` and return its result, the same tensor for each call with an equal key.

        `calls` runs the first time only. With an equal key it must read and write the same memory and hold no torch
        operation that computes; raises `NotAKernelError` that names one.
        """
        taped = self._taped.get(key)
        if taped is not None:
            taped[0].replay()
            return taped[1]
        tape = cpu.Tape()
        with tape, _KernelsOnly():  # type: ignore[no-untyped-call]
            result = calls()
        self._taped[key] = (tape, result)
        return result


class TapedPasses:
    """The tapes of a model's passes, by the cache that they run over, as long as that lives.

    Args:
        kernels_only: whether the model computes with kernels alone.
    """

    def __init__(self, kernels_only: bool) -> None:
        self._kernels_only = kernels_only
        self._by_cache: WeakKeyDictionary[AttentionBackend, Tapes] = WeakKeyDictionary()

    def over(self, attention: AttentionBackend, num_tokens: int) -> Tapes | None:
        """Those of passes over `attention`; None where a pass of so many tokens is not taped or not all kernels."""
        if num_tokens > MAX_TAPED_TOKENS or not (self._kernels_only and attention.kernels_only):
            return None
        return self._by_cache.setdefault(attention, Tapes())


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch operations that compute."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and keeping the compiler away would import it: seconds before the first token.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _SHAPING:
            raise NotAKernelError(f"{func} ran while a tape recorded; only kernels and views are replayed")
        return func(*args, **(kwargs or {}))
