"""A MiniMax-M3 checkpoint of 40 M random parameters, for measurements on more weights than the demo model has."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tandem import demo
from tandem.core import layout
from tandem.models import MiniMaxM3Config, attention_geometry, tile_specs
from tandem.models.checkpoint import WeightKind
from tandem.models.minimax_m3_weights import TEXT_PREFIX, weight_specs

_SHAPE = {
    "hidden_size": 384,
    "dense_intermediate_size": 2048,
    "intermediate_size": 384,
    "shared_intermediate_size": 384,
}
_TOPK_BLOCKS = 16


def num_parameters(config: MiniMaxM3Config) -> int:
    """Parameters of the text model."""
    return sum(spec.num_elements for spec in weight_specs(config))


def bytes_read_per_step(config: MiniMaxM3Config) -> int:
    """Bytes of weights that a step of one token reads, which every step exceeds: matrices packed as bf16.

    All but the embedding, and of each mixture the experts that one token takes.
    """
    experts_read = config.num_experts_per_tok / config.num_local_experts
    read = 0.0
    for spec in weight_specs(config):
        if not spec.name.endswith("embed_tokens.weight"):
            read += spec.num_elements * (experts_read if ".experts." in spec.name else 1.0)
    return int(2 * read)


def cache_bytes_read_per_step(config: MiniMaxM3Config, context: int, kv_dtype: layout.ElementType) -> int:
    """Bytes of the cache that the step of one token reads at a context: all index keys, and K and V of what is seen."""
    sparse = {entry.layer: entry.sparse for entry in attention_geometry(config)}
    read = 0
    for tile in tile_specs(config, kv_dtype):
        chosen = None if tile.role == layout.Role.INDEX_K else sparse[tile.layer]
        tokens = context if chosen is None else min(context, chosen.topk * chosen.block_size)
        read += tokens * tile.heads * tile.dim * (2 if kv_dtype == layout.ElementType.BF16 else 4)
    return read


def write_random_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint into `folder` and return it.

    Eight layers with the geometry of heads, index and blocks of the released model, and its 16 blocks per selection;
    tokenizer and vocabulary are the demo model's. Weights are normal, scaled so that activations stay of order one;
    norm weights and router biases are away from their neutral values.
    """
    config = copy.deepcopy(json.loads((demo.path() / "config.json").read_text(encoding="utf-8")))
    config["text_config"] |= _SHAPE
    config["text_config"]["sparse_attention_config"]["sparse_topk_blocks"] = _TOPK_BLOCKS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in demo.path().iterdir():
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    parsed = MiniMaxM3Config.from_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for spec in weight_specs(parsed):
        values = torch.randn(spec.shape, generator=generator)
        if spec.kind is WeightKind.MATRIX:
            scale = 1.0 if spec.name == "model.embed_tokens.weight" else spec.shape[1] ** -0.5
            values = (values * scale).bfloat16()
        elif spec.kind is WeightKind.VECTOR:
            values = (0.3 * values).bfloat16()
        else:
            values *= spec.shape[1] ** -0.5 if len(spec.shape) == 2 else 0.2
        tensors[TEXT_PREFIX + spec.name] = values
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
