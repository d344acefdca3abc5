"""transformers' MiniMax-M3 with the weights of a checkpoint folder, for comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bench.environment import version
from tandem.models import MiniMaxM3Config
from tandem.models.minimax_m3_weights import open_weights, weight_specs

MINIMUM_VERSION = (5, 17)


class TransformersMissingError(ValueError):
    """transformers is not installed, or is too old for MiniMax-M3; the message says what to install."""


def require() -> None:
    """Raise `TransformersMissingError` unless transformers can be used."""
    found = version("transformers")
    wanted = ".".join(map(str, MINIMUM_VERSION))
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < MINIMUM_VERSION:
        raise TransformersMissingError(
            f"this measurement compares with transformers {wanted} or newer, found is {found or 'none'}: "
            f"pip install 'transformers>={wanted}'"
        )


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model in `dtype`, routers in fp32, with the checkpoint's weights."""
    require()
    from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    config = MiniMaxM3VLTextConfig(**{key: value for key, value in text.items() if key != "architectures"})
    model: Any = MiniMaxM3VLForCausalLM(config)
    model.to(dtype).eval()
    for name, buffer in model.state_dict().items():
        if ".mlp.gate." in name:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            replacement = buffer.float()
            is_parameter = leaf in dict(module.named_parameters(recurse=False))
            setattr(module, leaf, torch.nn.Parameter(replacement) if is_parameter else replacement)
    model.load_state_dict(_state(folder), strict=True)
    return model


def _state(folder: Path) -> dict[str, Tensor]:
    """The weights under transformers' names: experts stacked, gate and up in one, the index branch an `indexer`."""
    config = MiniMaxM3Config.from_pretrained(folder)
    weights = open_weights(folder, config)
    state: dict[str, Tensor] = {}
    experts = range(config.num_local_experts)
    for spec in weight_specs(config):
        name = spec.name
        renamed = name.replace("block_sparse_moe", "mlp").replace("mlp.e_score", "mlp.gate.e_score")
        renamed = renamed.replace("self_attn.index_q_", "self_attn.indexer.q_")
        renamed = renamed.replace("self_attn.index_k_", "self_attn.indexer.k_")
        if ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            target = f"{renamed.partition('.experts.')[0]}.experts"
            if rest == "0.w1.weight":
                pairs = [[f"{stem}.experts.{e}.w1.weight", f"{stem}.experts.{e}.w3.weight"] for e in experts]
                state[f"{target}.gate_up_proj"] = torch.stack(
                    [weights.read_rows(pair, torch.float32) for pair in pairs]
                )
            elif rest == "0.w2.weight":
                downs = [weights.read(f"{stem}.experts.{e}.w2.weight", torch.float32) for e in experts]
                state[f"{target}.down_proj"] = torch.stack(downs)
        elif name.endswith(".gate_proj.weight"):
            pair = [name, name.replace("gate_proj", "up_proj")]
            state[renamed.replace("gate_proj", "gate_up_proj")] = weights.read_rows(pair, torch.float32)
        elif not name.endswith(".up_proj.weight"):
            state[renamed] = weights.read(name, torch.float32)
    return state
