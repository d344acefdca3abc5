"""Tiny checkpoints in the official format, and the same weights in transformers' model."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tandem.models.config import MiniMaxM3Config
from tandem.models.minimax_m3_weights import TEXT_PREFIX, weight_specs


@dataclass(frozen=True)
class Shape:
    """A tiny MiniMax-M3. `layers` has one letter per layer: d dense attention and MLP, s sparse attention and experts,
    a sparse attention with an MLP, e dense attention with experts."""

    layers: str = "ddss"
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    index_dim: int = 32
    block: int = 16
    topk: int = 4
    local: int = 1
    experts: int = 6
    experts_per_token: int = 2
    expert_width: int = 32
    dense_width: int = 96
    shared_width: int = 32
    vocab: int = 128
    extra: dict[str, Any] = field(default_factory=dict)


def text_config(shape: Shape) -> dict[str, Any]:
    """Return the bare text configuration with the keys of the official one."""
    sparse = [int(letter in "sa") for letter in shape.layers]
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rope_theta": 5000000,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 8192,
        "intermediate_size": shape.expert_width,
        "dense_intermediate_size": shape.dense_width,
        "shared_intermediate_size": shape.shared_width,
        "n_shared_experts": 1,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_layer_freq": [int(letter in "se") for letter in shape.layers],
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "attention_output_gate": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "num_mtp_modules": 7,
        "num_nextn_predict_layers": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
            "sparse_num_index_heads": shape.kv_heads,
            "sparse_index_dim": shape.index_dim,
            "sparse_block_size": shape.block,
            "sparse_topk_blocks": shape.topk,
            "sparse_init_block": 0,
            "sparse_local_block": shape.local,
            "sparse_score_type": "max",
        },
    } | shape.extra


def wrapped_config(text: dict[str, Any]) -> dict[str, Any]:
    """Return the official vision-language wrapper around a text configuration."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "image_token_index": 25,
        "video_token_index": 26,
        "projector_hidden_size": text["hidden_size"],
        "vision_config": {"hidden_size": 1280, "num_hidden_layers": 32},
        "text_config": text,
    }


def random_weights(config: MiniMaxM3Config, seed: int) -> dict[str, Tensor]:
    """Return every text tensor under its official name (no prefix): bf16, router and bias fp32, nothing zero or one.

    Matrices keep activations of order one; norm weights and router biases are far from their neutral values.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in weight_specs(config):
        values = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith(("norm.weight", "layernorm.weight")):
            tensors[spec.name] = (0.3 * values).bfloat16()
        elif spec.name.endswith("e_score_correction_bias"):
            tensors[spec.name] = 0.2 * values
        elif spec.name.endswith(".gate.weight"):
            tensors[spec.name] = values * spec.shape[1] ** -0.5
        elif spec.name == "model.embed_tokens.weight":
            tensors[spec.name] = values.bfloat16()
        else:
            tensors[spec.name] = (values * spec.shape[1] ** -0.5).bfloat16()
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    prefix: str = TEXT_PREFIX,
    num_shards: int = 1,
    others: dict[str, Tensor] | None = None,
) -> Path:
    """Write `tensors` under `prefix`, and `others` under their own names, in `num_shards` files; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()} | (others or {})
    if num_shards == 1:
        safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    names = sorted(stored)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: stored[name] for name in names[shard::num_shards]}
        safetensors.torch.save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def quantise_mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values and E8M0 exponents (uint8) of `weight` [out, in], one exponent per 32 columns."""
    blocks = weight.float().unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1).clamp(min=1e-30)
    # The largest power of two that keeps the block within E4M3's 448.
    exponents = torch.ceil(torch.log2(largest / 448.0))
    values = (blocks / torch.exp2(exponents).unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn)
    return values, (exponents + 127).to(torch.uint8)


def quantise_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed E2M1 codes (uint8), E4M3 block scales and the fp32 global scale of `weight` [out, in]."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weight.float().unflatten(1, (-1, 16))
    scale_2 = weight.float().abs().max() / (6.0 * 448.0)
    scale = (blocks.abs().amax(-1) / 6.0 / scale_2).clamp(min=2**-6).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * scale_2).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - grid).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, scale_2


def transformers_model(text: dict[str, Any], tensors: dict[str, Tensor], attention: str = "eager") -> Any:
    """Return transformers' model in fp32 with the same weights. Its experts and gate/up pairs are fused, gate first."""
    from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig  # slow to import

    config = MiniMaxM3VLTextConfig(**{key: value for key, value in text.items() if key != "architectures"})
    config._attn_implementation = attention
    model = MiniMaxM3VLForCausalLM(config).float().eval()
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        values = tensor.float()
        new = name.replace("block_sparse_moe", "mlp").replace("mlp.e_score", "mlp.gate.e_score")
        for part in ("q", "k"):
            new = new.replace(f"self_attn.index_{part}_", f"self_attn.indexer.{part}_")
        if new.endswith("gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")].float()
            state[new.replace("gate_proj", "gate_up_proj")] = torch.cat((values, up))
        elif ".experts." in new:
            if new.endswith("experts.0.w2.weight"):
                experts = [
                    tensors[name.replace("experts.0.", f"experts.{e}.")] for e in range(text["num_local_experts"])
                ]
                state[new.replace("0.w2.weight", "down_proj")] = torch.stack([down.float() for down in experts])
            elif new.endswith("experts.0.w1.weight"):
                pairs = [
                    torch.cat([tensors[name.replace("experts.0.w1", f"experts.{e}.{w}")].float() for w in ("w1", "w3")])
                    for e in range(text["num_local_experts"])
                ]
                state[new.replace("0.w1.weight", "gate_up_proj")] = torch.stack(pairs)
        elif not new.endswith("up_proj.weight"):
            state[new] = values
    model.load_state_dict(state, strict=True)
    return model
