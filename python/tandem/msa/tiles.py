"""A cache view as a strided tensor over the pool."""

import torch
from torch import Tensor

from tandem.core import layout as core_layout

_TORCH_DTYPE = {
    core_layout.ElementType.BF16: torch.bfloat16,
    core_layout.ElementType.FP16: torch.float16,
    core_layout.ElementType.FP32: torch.float32,
}


class ElementTypeError(ValueError):
    """A cache element type that cannot be computed on; the message names it and those that can."""


def torch_dtype(element: core_layout.ElementType) -> torch.dtype:
    """The dtype of a cache element type. Raises `ElementTypeError` for those that no backend computes on."""
    if element not in _TORCH_DTYPE:
        names = ", ".join(known.name for known in _TORCH_DTYPE)
        raise ElementTypeError(f"cache element type {element.name} cannot be computed on here, allowed are {names}")
    return _TORCH_DTYPE[element]


def tile_tensor(pool: Tensor, view: core_layout.View, num_slots: int) -> Tensor:
    """The tiles of one (layer, role) in all slots, aliasing the pool.

    Args:
        pool: uint8 [num_slots * slot_bytes], contiguous.
        view: which tiles, cut into sub-pages of `view.tokens_per_page` tokens.
        num_slots: slots of the pool.

    Returns: [num_slots, sub_pages, heads, tokens_per_page, dim] of the view's element type.
    """
    dtype = torch_dtype(view.dtype)
    size = dtype.itemsize
    return pool.view(dtype).as_strided(
        (num_slots, view.sub_pages, view.heads, view.tokens_per_page, view.dim),
        (
            view.slot_stride // size,
            view.sub_page_stride // size,
            view.head_stride // size,
            view.token_stride // size,
            1,
        ),
        view.base_offset // size,
    )
