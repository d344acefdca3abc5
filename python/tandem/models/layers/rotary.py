"""Rotary position embedding, half-split: the first `rotary_dim` dims of a head are rotated, the rest pass through."""

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines of the angles p * theta^(-2i / rotary_dim) for every position p, computed in fp32.

    `cos` and `sin` are [positions, rotary_dim / 2] fp32, i = 0 .. rotary_dim/2 - 1 along the second axis.
    """

    def __init__(self, rotary_dim: int, theta: float, num_positions: int) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * (1.0 / theta**exponents)
        self.rotary_dim = rotary_dim
        self.cos = angles.cos()
        self.sin = angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [T, heads, D] fp32 by each token's `cos` and `sin` [T, rotary_dim / 2]; return the result.

    Dim i < rotary_dim / 2 pairs with dim i + rotary_dim / 2; dims from rotary_dim on are unchanged.
    """
    half = cos.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
