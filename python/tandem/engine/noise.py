"""Gumbel noise from a counter: a pure function of (request seed, token index, vocabulary id).

Nothing is carried from draw to draw, so a token's noise does not depend on neighbours, batch shape, chunking or on how
the request came to this index. The bits are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014): its finaliser ``mix`` applied to a Weyl sequence of the golden-ratio increment. The three
inputs are folded in one after the other::

    key  = mix(mix(seed) + GOLDEN * (token_index + 1))
    bits = mix(key + GOLDEN * (vocabulary_id + 1))

``mix`` is a bijection of 64 bits in which every input bit flips each output bit with probability near 1/2, hence
consecutive seeds, indices and ids give unrelated draws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _xor_shift(x: Tensor, count: int) -> Tensor:
    """``x ^ (x >> count)`` with a logical shift: torch shifts int64 arithmetically, so the sign bits are masked off."""
    return x ^ ((x >> count) & ((1 << (64 - count)) - 1))


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser over int64 tensors, read as unsigned; products wrap modulo 2**64."""
    x = _xor_shift(x, 30) * _MIX_1
    x = _xor_shift(x, 27) * _MIX_2
    return _xor_shift(x, 31)


def as_signed_seed(seed: int) -> int:
    """A seed in [0, 2**64) as the int64 of the same bits."""
    return _signed(seed)


def random_bits(seed: Tensor, token_index: Tensor, vocab_size: int) -> Tensor:
    """64 random bits per (position, vocabulary id).

    Args:
        seed: int64 ``[P]``, the request's seed (the bits of an unsigned one).
        token_index: int64 ``[P]``, the index in the sequence of the token to be drawn.
        vocab_size: V.

    Returns:
        int64 ``[P, V]``.
    """
    key = mix64(mix64(seed) + _GOLDEN * (token_index + 1))
    counter = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=seed.device) * _GOLDEN
    return mix64(key[:, None] + counter)


def gumbel_noise(seed: Tensor, token_index: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, fp32 ``[P, V]``; arguments as in `random_bits`.

    ``-log(-log1p(-u))`` with u = (b + 1/2) / 2**53 of the 53 upper bits. Large noise comes from small u, where fp32 is
    finest, so the upper tail reaches 37; the lower one ends at -2.8, below which no argmax over more than a few equal
    tokens ever looks. Every value is finite.
    """
    bits = (random_bits(seed, token_index, vocab_size) >> 11) & (2**53 - 1)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
