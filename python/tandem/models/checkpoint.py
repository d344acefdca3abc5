"""Weights of a checkpoint: checked as a whole against what the model needs, then read tensor by tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from tandem.models.errors import TensorMismatchError
from tandem.models.quant import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    StoredTensor,
    WeightFormat,
    dequantise_mxfp8,
    dequantise_nvfp4,
    mxfp8_tensors,
    nvfp4_tensors,
)
from tandem.models.safetensors_files import SafetensorsFiles

_PLAIN_DTYPES = ("BF16", "F32")


class WeightKind(Enum):
    """What a weight is stored as: a matrix can be quantised, a vector is BF16 or F32, the router is F32 always."""

    MATRIX = "matrix"
    VECTOR = "vector"
    ROUTER = "router"


@dataclass(frozen=True)
class WeightSpec:
    """A weight that a model needs: its name in the checkpoint, its logical shape, its kind."""

    name: str
    shape: tuple[int, ...]
    kind: WeightKind

    @property
    def num_elements(self) -> int:
        """Parameters of this weight."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Weights(Protocol):
    """Where a model's layers take their weights from, by the checkpoint's names."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the weight `name` as a new, contiguous tensor of `dtype`, dequantised where it is stored quantised."""

    def read_rows(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the matrices `names` (equal width) one below the other as one new tensor of `dtype`."""


class CheckpointWeights:
    """The weights of a model folder, or of the named subset of it.

    Raises `TensorMismatchError` that lists every missing, unexpected and misshaped tensor; nothing is loaded before all
    of them fit.
    """

    def __init__(
        self, files: SafetensorsFiles, specs: Sequence[WeightSpec], ignored_prefixes: tuple[str, ...] = ()
    ) -> None:
        self._files = files
        self._specs = {spec.name: spec for spec in specs}
        self._stored: dict[str, tuple[WeightFormat, tuple[StoredTensor, ...]]] = {}
        self.formats: dict[WeightFormat, int] = {}
        """Weights per storage format."""
        self.num_bytes = 0
        """Bytes that the weights take as stored, scales included."""
        self._check(ignored_prefixes)

    @property
    def num_tensors(self) -> int:
        """Weights, whose scales are not counted."""
        return len(self._specs)

    @property
    def num_parameters(self) -> int:
        """Numbers that the weights stand for, however they are stored."""
        return sum(spec.num_elements for spec in self._specs.values())

    def _check(self, ignored_prefixes: tuple[str, ...]) -> None:
        missing: list[str] = []
        wrong: list[str] = []
        accounted: set[str] = set()
        for spec in self._specs.values():
            weight_format, stored = self._stored_tensors(spec)
            self._stored[spec.name] = (weight_format, stored)
            self.formats[weight_format] = self.formats.get(weight_format, 0) + 1
            for tensor in stored:
                name = spec.name + tensor.suffix
                accounted.add(name)
                entry = self._files.entries.get(name)
                if entry is None:
                    missing.append(name)
                    continue
                self.num_bytes += entry.num_bytes
                if entry.dtype not in tensor.dtypes or entry.shape != tensor.shape:
                    expected = f"{' or '.join(tensor.dtypes)} {list(tensor.shape)}"
                    wrong.append(f"{name} is {entry.dtype} {list(entry.shape)}, expected {expected}")
            if weight_format is not WeightFormat.PLAIN and (reason := _unaligned(spec, weight_format)):
                wrong.append(reason)
        unexpected = [
            name
            for name in self._files.entries
            if name not in accounted and not name.startswith(ignored_prefixes) and not _is_unused(name)
        ]
        if missing or unexpected or wrong:
            raise TensorMismatchError(str(self._files.folder), sorted(missing), sorted(unexpected), sorted(wrong))

    def _stored_tensors(self, spec: WeightSpec) -> tuple[WeightFormat, tuple[StoredTensor, ...]]:
        """Tell the format of a weight from the tensors that are there, and return the tensors that make it up."""
        if spec.kind is WeightKind.ROUTER:
            return WeightFormat.PLAIN, (StoredTensor("", ("F32",), spec.shape),)
        plain = (StoredTensor("", _PLAIN_DTYPES, spec.shape),)
        if spec.kind is WeightKind.VECTOR:
            return WeightFormat.PLAIN, plain
        rows, columns = spec.shape
        entries = self._files.entries
        dtype = entries[spec.name].dtype if spec.name in entries else None
        if dtype == "U8" or f"{spec.name}_scale_2" in entries:
            return WeightFormat.NVFP4, nvfp4_tensors((rows, columns))
        if dtype == "F8_E4M3" or f"{spec.name}_scale_inv" in entries:
            suffix = "_scale" if f"{spec.name}_scale" in entries else "_scale_inv"
            return WeightFormat.MXFP8, mxfp8_tensors((rows, columns), suffix)
        return WeightFormat.PLAIN, plain

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """See `Weights.read`."""
        out = torch.empty(self._specs[name].shape, dtype=dtype)
        self._read_into(name, out)
        return out

    def read_rows(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """See `Weights.read_rows`."""
        heights = [self._specs[name].shape[0] for name in names]
        out = torch.empty((sum(heights), self._specs[names[0]].shape[1]), dtype=dtype)
        for name, rows in zip(names, torch.split(out, heights), strict=True):
            self._read_into(name, rows)
        return out

    def _read_into(self, name: str, out: Tensor) -> None:
        weight_format, stored = self._stored[name]
        tensors = [self._files.read(name + tensor.suffix) for tensor in stored]
        if weight_format is WeightFormat.MXFP8:
            out.copy_(dequantise_mxfp8(tensors[0], tensors[1]))
        elif weight_format is WeightFormat.NVFP4:
            out.copy_(dequantise_nvfp4(tensors[0], tensors[1], tensors[2]))
        else:
            out.copy_(tensors[0])


def _unaligned(spec: WeightSpec, weight_format: WeightFormat) -> str | None:
    block = MXFP8_BLOCK if weight_format is WeightFormat.MXFP8 else NVFP4_BLOCK
    columns = spec.shape[1]
    if columns % block == 0:
        return None
    return f"{spec.name} is {weight_format.value} with {columns} columns, which blocks of {block} do not divide"


def _is_unused(name: str) -> bool:
    """Tell tensors that a checkpoint may carry for what is not computed here.

    These are static activation and cache scales of quantised exports, and layers for multi-token prediction.
    """
    return name.endswith((".input_scale", ".k_scale", ".v_scale")) or ".mtp." in f".{name}"
