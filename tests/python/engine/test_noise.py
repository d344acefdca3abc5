"""The counter generator: a pure function, uniform, and unrelated between seeds, indices and ids."""

import math

import pytest
import torch

from tandem.engine.noise import as_signed_seed, gumbel_noise, mix64, random_bits


def reference_mix(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_mixing_equals_integer_arithmetic_modulo_2_to_64() -> None:
    values = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF, 0xFEDCBA9876543210]
    mixed = mix64(tensor(*(as_signed_seed(v) for v in values)))
    assert [v % 2**64 for v in mixed.tolist()] == [reference_mix(v) for v in values]


def test_bits_follow_the_documented_formula() -> None:
    golden, seed, index = 0x9E3779B97F4A7C15, 2**64 - 3, 41
    key = reference_mix((reference_mix(seed) + golden * (index + 1)) % 2**64)
    expected = [reference_mix((key + golden * (v + 1)) % 2**64) for v in range(5)]
    bits = random_bits(tensor(as_signed_seed(seed)), tensor(index), 5)[0]
    assert [v % 2**64 for v in bits.tolist()] == expected


def test_a_row_of_noise_does_not_depend_on_its_neighbours() -> None:
    seeds, indices = torch.arange(37), torch.arange(37) * 3
    for vocab_size in (17, 2048, 40_001):
        together = gumbel_noise(seeds, indices, vocab_size)
        for row in (0, 5, 36):
            alone = gumbel_noise(seeds[row : row + 1], indices[row : row + 1], vocab_size)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("axis", ["seed", "index", "id"])
def test_draws_along_each_input_are_uniform(axis: str) -> None:
    count, bins = 40_000, 64
    if axis == "seed":
        bits = random_bits(torch.arange(count), torch.full((count,), 7), 1)[:, 0]
    elif axis == "index":
        bits = random_bits(torch.full((count,), 7), torch.arange(count), 1)[:, 0]
    else:
        bits = random_bits(tensor(7), tensor(7), count)[0]
    for shift in (0, 11, 40, 58):
        observed = torch.bincount((bits >> shift) & (bins - 1), minlength=bins).double()
        expected = count / bins
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        # 63 degrees of freedom: mean 63, standard deviation 11.2.
        assert chi_square < 63 + 5 * 11.2


def test_neighbouring_inputs_give_uncorrelated_noise() -> None:
    count = 20_000
    base = gumbel_noise(tensor(100), tensor(50), count)[0]
    for seed, index in ((101, 50), (100, 51), (101, 49), (99, 51)):
        other = gumbel_noise(tensor(seed), tensor(index), count)[0]
        correlation = float(torch.corrcoef(torch.stack([base, other]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(count)
    shifted = float(torch.corrcoef(torch.stack([base[1:], base[:-1]]))[0, 1])
    assert abs(shifted) < 5 / math.sqrt(count)


def test_noise_is_finite_and_has_the_moments_of_a_gumbel() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 5000).double()
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    # Among a million draws the largest lies near ln(1e6) = 13.8; a generator of 16 bits would stop at 11.
    assert float(noise.max()) > 12.0


def test_the_lengths_of_the_scale_do_not_overflow() -> None:
    noise = gumbel_noise(tensor(as_signed_seed(2**64 - 1)), tensor(2**31 - 1), 1000)
    assert torch.isfinite(noise).all()
