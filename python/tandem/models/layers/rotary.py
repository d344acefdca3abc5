"""Rotary position embedding, half-split: the first `rotary_dim` dims of a head are rotated, the rest pass through."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of one step's positions, [T, rotary_dim / 2] fp32 each; shared by all layers."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """Angles p * theta^(-2i / rotary_dim), i = 0 .. rotary_dim/2 - 1, computed in fp32."""

    def __init__(self, rotary_dim: int, theta: float, device: torch.device | str = "cpu") -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self._frequencies = (1.0 / theta**exponents).to(device)

    def at(self, position: Tensor) -> Rotation:
        """Return the rotation for the token positions `position` [T] int32."""
        angles = position.unsqueeze(1) * self._frequencies
        return Rotation(angles.cos(), angles.sin())


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate `heads` [T, heads, D] fp32 and return the result; dims from rotary_dim on are unchanged."""
    half = rotation.cos.shape[1]
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
