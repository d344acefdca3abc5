"""The safetensors files of a model folder: one file, or shards named by an index.

Headers are read and checked here (format: 8 bytes little-endian header length, a JSON header, then the bytes of all
tensors without gaps), so that a cut-off file is reported with its sizes before anything is loaded.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from tandem.models.config import read_json_object
from tandem.models.errors import CheckpointError, listed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# No sane header is longer; a longer one means that the file is something else.
_MAX_HEADER_BYTES = 256 * 2**20

_ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is and what it is; `dtype` as the file spells it (BF16, F32, F8_E4M3, U8, ...)."""

    file: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class SafetensorsFiles:
    """All tensors of a model folder by name, without `prefix` where the file has it.

    Raises `CheckpointError` for a missing, cut-off or malformed file, naming it.
    """

    def __init__(self, folder: Path, prefix: str = "", *, allow_absent: bool = False) -> None:
        """Read the headers in `folder`. With `allow_absent`, files that are not there are listed in `absent`."""
        self.folder = folder
        self.absent: list[str] = []
        self.entries: dict[str, TensorEntry] = {}
        self._open_files: dict[Path, Any] = {}
        for file_name, names in self._files(allow_absent).items():
            path = folder / file_name
            if not path.is_file():
                if not allow_absent:
                    raise CheckpointError(f"{path} is missing; {INDEX_FILE} places {len(names)} tensors in it")
                self.absent.append(file_name)
                continue
            found = read_header(path)
            if lost := sorted(names - found.keys()):
                raise CheckpointError(f"{path} lacks tensors that {INDEX_FILE} places in it: {listed(lost)}")
            for stored_name, entry in found.items():
                name = stored_name.removeprefix(prefix)
                if name in self.entries:
                    raise CheckpointError(f"{path} holds {stored_name}, which {self.entries[name].file} holds too")
                self.entries[name] = entry

    def _files(self, allow_absent: bool) -> dict[str, set[str]]:
        """Return the files of the folder, each with the tensors that the index places in it (none without an index)."""
        index_path = self.folder / INDEX_FILE
        if index_path.is_file():
            weight_map = read_json_object(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index_path} has no weight_map")
            files: dict[str, set[str]] = {}
            for name, file_name in weight_map.items():
                if not isinstance(file_name, str) or Path(file_name).name != file_name:
                    raise CheckpointError(f"{index_path} places {name} in {file_name!r}, which is not a file name")
                files.setdefault(file_name, set()).add(name)
            return dict(sorted(files.items()))
        if (self.folder / SINGLE_FILE).is_file():
            return {SINGLE_FILE: set()}
        if allow_absent:
            self.absent.append(SINGLE_FILE)
            return {}
        raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` as stored. Files are mapped, so only its own bytes are read."""
        entry = self.entries[name]
        if entry.file not in self._open_files:
            self._open_files[entry.file] = _open(entry.file)
        tensor = self._open_files[entry.file].get_tensor(entry.stored_name)
        assert isinstance(tensor, Tensor)
        return tensor


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file by stored name. Raises `CheckpointError` that names the file."""
    raw, size = _header_bytes(path)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, value) for name, value in header.items()}
        data_bytes = max((value["data_offsets"][1] for value in header.values()), default=0)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has a malformed safetensors header: {error!r}") from error
    expected = 8 + len(raw) + data_bytes
    if size != expected:
        state = "truncated" if size < expected else "damaged"
        raise CheckpointError(f"{path} is {state}: its header describes {expected} bytes, the file has {size}")
    return entries


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the JSON header of a safetensors file and the size of the whole file in bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes cannot hold a safetensors header")
            (num_bytes,) = struct.unpack("<Q", start)
            if num_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file: it claims a header of {num_bytes} bytes")
            if size < 8 + num_bytes:
                raise CheckpointError(f"{path} is truncated: its header ends at byte {8 + num_bytes} of {size}")
            return file.read(num_bytes), size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _entry(path: Path, name: str, value: dict[str, Any]) -> TensorEntry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    element_bytes = _ELEMENT_BYTES.get(dtype)
    if element_bytes is not None and num_elements * element_bytes != end - begin:
        raise CheckpointError(
            f"{path}: {name}, {dtype} {list(shape)}, takes {num_elements * element_bytes} bytes but has {end - begin}"
        )
    return TensorEntry(path, name, dtype, shape, end - begin)
