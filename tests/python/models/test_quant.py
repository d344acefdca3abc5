"""Quantised formats decode to the values their definitions give."""

import torch

from tandem.models.quant import dequantise_mxfp8, dequantise_nvfp4

from .support import quantise_mxfp8, quantise_nvfp4

# Written out from the OCP microscaling formats: E2M1 code -> value.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_mxfp8_is_value_times_two_to_the_exponent_less_127() -> None:
    weight = torch.tensor([[1.5] * 32 + [-448.0] * 32, [0.25] * 32 + [3.5] * 32]).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[127, 130], [120, 0]], dtype=torch.uint8)
    values = dequantise_mxfp8(weight, exponents)
    assert values.dtype == torch.float32
    expected = torch.tensor([[1.5] * 32 + [-448.0 * 8] * 32, [0.25 / 128] * 32 + [3.5 * 2.0**-127] * 32])
    assert torch.equal(values, expected)


def test_mxfp8_accepts_exponents_typed_as_e8m0() -> None:
    weight, exponents = quantise_mxfp8(torch.randn(3, 64, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(
        dequantise_mxfp8(weight, exponents.view(torch.float8_e8m0fnu)), dequantise_mxfp8(weight, exponents)
    )


def test_nvfp4_puts_the_even_column_in_the_low_nibble() -> None:
    codes = list(range(16))
    packed = torch.tensor([[codes[i] | codes[i + 1] << 4 for i in range(0, 16, 2)]], dtype=torch.uint8)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    values = dequantise_nvfp4(packed, scale, torch.tensor(0.5))
    assert values.tolist() == [E2M1 + [-value for value in E2M1]]


def test_nvfp4_scales_each_sixteen_columns_by_block_and_global_scale() -> None:
    packed = torch.full((2, 16), 0x22, dtype=torch.uint8)  # every value 1.0
    scale = torch.tensor([[1.0, 448.0], [0.5, 2.0**-6]]).to(torch.float8_e4m3fn)
    values = dequantise_nvfp4(packed, scale, torch.tensor(3.0))
    assert torch.equal(values, torch.tensor([[3.0] * 16 + [1344.0] * 16, [1.5] * 16 + [3.0 * 2.0**-6] * 16]))


def test_quantising_and_back_stays_within_half_a_step_of_each_format() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(11))
    mxfp8 = dequantise_mxfp8(*quantise_mxfp8(weight))
    assert ((mxfp8 - weight).abs() <= weight.abs() * 2**-4 + 1e-4).all()
    nvfp4 = dequantise_nvfp4(*quantise_nvfp4(weight))
    largest = weight.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    assert ((nvfp4 - weight).abs() <= largest / 6 * 1.1).all()
