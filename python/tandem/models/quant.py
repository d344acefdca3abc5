"""Quantised weight formats, turned back into plain matrices while loading.

Which format a weight has is read from its tensors. For a weight `W` [out, in]:

* plain: `W` BF16 or F32.
* MXFP8 (OCP microscaling): `W` F8_E4M3 [out, in] and U8 E8M0 exponents s [out, in/32]; value = w * 2^(s - 127). The
  release of MiniMax names the exponents `W_scale_inv`; the export of NVIDIA Model Optimizer
  (`modelopt/torch/export/unified_export_hf.py`) names them `W_scale`.
* NVFP4 as exported by Model Optimizer: `W` U8 [out, in/2] holding two E2M1 codes, even column in the low nibble,
  `W_scale` F8_E4M3 [out, in/16] and `W_scale_2` F32 scalar; value = code * scale * scale_2. `input_scale` belongs to
  activation quantisation and is not used.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

# Values of the sixteen E2M1 codes (sign, two exponent bits, one mantissa bit).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class WeightFormat(Enum):
    """How a matrix is stored."""

    PLAIN = "plain"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a format consists of: suffix to the weight's name, file dtypes that are right, shape."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


def mxfp8_tensors(shape: tuple[int, int], scale_suffix: str) -> tuple[StoredTensor, ...]:
    """Return the tensors of an MXFP8 weight of logical `shape` [out, in]."""
    rows, columns = shape
    return (
        StoredTensor("", ("F8_E4M3",), shape),
        StoredTensor(scale_suffix, ("U8", "F8_E8M0"), (rows, -(-columns // MXFP8_BLOCK))),
    )


def nvfp4_tensors(shape: tuple[int, int]) -> tuple[StoredTensor, ...]:
    """Return the tensors of an NVFP4 weight of logical `shape` [out, in]."""
    rows, columns = shape
    return (
        StoredTensor("", ("U8",), (rows, -(-columns // 2))),
        StoredTensor("_scale", ("F8_E4M3",), (rows, -(-columns // NVFP4_BLOCK))),
        StoredTensor("_scale_2", ("F32",), ()),
    )


def dequantise_mxfp8(weight: Tensor, exponents: Tensor) -> Tensor:
    """Return the fp32 values of E4M3 `weight` [out, in] with E8M0 `exponents` [out, in/32] (uint8); exact in fp32."""
    scale = torch.exp2(exponents.view(torch.uint8).float() - 127.0)
    blocks = weight.float().view(*scale.shape, MXFP8_BLOCK)
    return (blocks * scale.unsqueeze(-1)).flatten(1)


def dequantise_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Return the fp32 values of `packed` [out, in/2] uint8 with E4M3 `scale` [out, in/16] and fp32 scalar `scale_2`.

    The two scales are multiplied first, in fp32, as the format's own kernels do.
    """
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    blocks = _E2M1[codes.int()].view(*scale.shape, NVFP4_BLOCK)
    return (blocks * (scale.float() * scale_2).unsqueeze(-1)).flatten(1)
