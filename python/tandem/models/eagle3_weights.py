"""The tensors of an Eagle3 checkpoint: names, shapes, and what it shares with its target."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tandem.models.checkpoint import CheckpointWeights, WeightKind, WeightSpec
from tandem.models.eagle3_config import Eagle3Config
from tandem.models.errors import CheckpointError, TensorMismatchError
from tandem.models.safetensors_files import SafetensorsFiles, TensorEntry

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_MAP = "d2t"
# Which target tokens the draft vocabulary covers: needed in training only.
_TRAINING_MAP = "t2d"
_LEGACY_PREFIX = ("midlayer.", "layers.0.")
_LEGACY_NAMES = {f"aux_norm_{place}.weight": f"fc_norm.{i}.weight" for i, place in enumerate(("low", "mid", "high"))}


class Eagle3Weights:
    """The weights in a drafter's folder, checked as a whole against its configuration.

    Raises `CheckpointError`; a `TensorMismatchError` lists every missing, unexpected and misshaped tensor.

    Attributes:
        weights: everything but the draft vocabulary's map.
        has_embedding, has_head: whether the checkpoint brings its own.
    """

    def __init__(self, folder: Path, config: Eagle3Config, num_captured: int) -> None:
        self._files = SafetensorsFiles(folder)
        self._files.entries = _renamed(self._files)
        self._config = config
        entries = self._files.entries
        self.has_embedding = EMBEDDING in entries
        # The target's head speaks the whole vocabulary in its own order, so it cannot stand in for a smaller one.
        self.has_head = HEAD in entries or _MAP in entries or config.draft_vocab_size != config.vocab_size
        specs = list(_specs(config, num_captured, self.has_embedding, self.has_head))
        missing, wrong = self._check_maps()
        try:
            self.weights = CheckpointWeights(self._files, specs, (_MAP, _TRAINING_MAP))
        except TensorMismatchError as error:
            missing, wrong = missing + error.missing, wrong + error.wrong
            raise TensorMismatchError(str(folder), sorted(missing), error.unexpected, sorted(wrong)) from error
        if missing or wrong:
            raise TensorMismatchError(str(folder), missing, [], wrong)

    def draft_to_target(self) -> Tensor | None:
        """Return the target's id of each draft id, int32 [draft vocabulary]; None where they are the same.

        The checkpoint's `d2t` holds offsets: target id = draft id + offset. Raises `CheckpointError` for ids that are
        outside the target's vocabulary or named twice.
        """
        if _MAP not in self._files.entries:
            return None
        offsets = self._files.read(_MAP).to(torch.int64)
        ids = torch.arange(len(offsets)) + offsets
        folder, vocab = self._files.folder, self._config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise CheckpointError(
                f"{folder}: {_MAP} names target ids {int(ids.min())} to {int(ids.max())}, allowed are 0 to {vocab - 1}"
            )
        if len(torch.unique(ids)) != len(ids):
            raise CheckpointError(f"{folder}: {_MAP} gives {len(ids)} draft ids only {len(torch.unique(ids))} targets")
        return ids.to(torch.int32)

    def _check_maps(self) -> tuple[list[str], list[str]]:
        """Return (missing, wrong) of the draft vocabulary's maps."""
        config, entries = self._config, self._files.entries
        missing = [_MAP] if config.draft_vocab_size != config.vocab_size and _MAP not in entries else []
        wrong = []
        for name, dtypes, length in (
            (_MAP, ("I64", "I32"), config.draft_vocab_size),
            (_TRAINING_MAP, ("BOOL", "U8"), config.vocab_size),
        ):
            entry = entries.get(name)
            if entry is not None and (entry.dtype not in dtypes or entry.shape != (length,)):
                expected = f"{' or '.join(dtypes)} [{length}]"
                wrong.append(f"{name} is {entry.dtype} {list(entry.shape)}, expected {expected}")
        return missing, wrong


def _renamed(files: SafetensorsFiles) -> dict[str, TensorEntry]:
    """Return the tensors of `files` by their present names. Raises `CheckpointError` for one under both its names."""
    old, new = _LEGACY_PREFIX
    entries: dict[str, TensorEntry] = {}
    for stored, entry in files.entries.items():
        name = _LEGACY_NAMES.get(stored, new + stored.removeprefix(old) if stored.startswith(old) else stored)
        if name in entries:
            raise CheckpointError(f"{entry.file} holds {name} under two names, one of them {stored}")
        entries[name] = entry
    return entries


def _specs(config: Eagle3Config, num_captured: int, embedding: bool, head: bool) -> Iterator[WeightSpec]:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    if embedding:
        yield _matrix(EMBEDDING, config.vocab_size, hidden)
    if config.fc_norm:
        for i in range(num_captured):
            yield _vector(f"fc_norm.{i}.weight", hidden)
    if config.norm_before_fc:
        yield _vector("input_norm.weight", num_captured * hidden)
    yield _matrix("fc.weight", hidden, num_captured * hidden)
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield _vector(f"layers.0.{norm}.weight", hidden)
    yield _matrix("layers.0.self_attn.q_proj.weight", queries, 2 * hidden)
    yield _matrix("layers.0.self_attn.k_proj.weight", keys, 2 * hidden)
    yield _matrix("layers.0.self_attn.v_proj.weight", keys, 2 * hidden)
    yield _matrix("layers.0.self_attn.o_proj.weight", hidden, queries)
    yield _matrix("layers.0.mlp.gate_proj.weight", config.intermediate_size, hidden)
    yield _matrix("layers.0.mlp.up_proj.weight", config.intermediate_size, hidden)
    yield _matrix("layers.0.mlp.down_proj.weight", hidden, config.intermediate_size)
    yield _vector("norm.weight", hidden)
    if head:
        yield _matrix(HEAD, config.draft_vocab_size, hidden)


def _matrix(name: str, rows: int, columns: int) -> WeightSpec:
    return WeightSpec(name, (rows, columns), WeightKind.MATRIX)


def _vector(name: str, length: int) -> WeightSpec:
    return WeightSpec(name, (length,), WeightKind.VECTOR)
