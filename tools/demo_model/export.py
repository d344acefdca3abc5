"""The checkpoint in the official format: names with the VL prefix, bf16, router weight and bias fp32."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.drafter_model import DraftWeights
from tools.demo_model.model import Weights
from tools.demo_model.shape import Shape

PREFIX = "language_model."
WEIGHTS_FILE = "model.safetensors"


def save_checkpoint(weights: Weights, folder: Path, *, bos: int, eos: int) -> None:
    """Write `config.json` and `model.safetensors` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    with torch.no_grad():
        values = dict(weights.named_parameters()) | dict(weights.named_buffers())
        for name, source, index in _tensors(weights.shape):
            tensors[PREFIX + name] = values[source][index].detach().to("cpu", _dtype(source)).contiguous().clone()
    _write(folder, tensors, _config(weights.shape, bos, eos))


def save_drafter(weights: DraftWeights, folder: Path) -> None:
    """Write the drafter's `config.json` and `model.safetensors` into `folder`: a head without embedding and lm_head."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        values = dict(weights.named_parameters())
        tensors = {
            name: values[source][index].detach().to("cpu", torch.bfloat16).contiguous().clone()
            for name, source, index in _draft_tensors(weights.shape)
        }
    _write(folder, tensors, _draft_config(weights.shape))


def load_drafter(shape: Shape, folder: Path) -> DraftWeights:
    """Read weights that `save_drafter` wrote, as fp32; raises KeyError if a tensor is missing."""
    stored = load_file(str(folder / WEIGHTS_FILE))
    weights = DraftWeights(shape, seed=0)
    values = dict(weights.named_parameters())
    with torch.no_grad():
        for name, source, index in _draft_tensors(shape):
            values[source][index].copy_(stored[name])
    return weights


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write the weights, never half of them under their final name, and the configuration."""
    partial = folder / (WEIGHTS_FILE + ".part")
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.rename(folder / WEIGHTS_FILE)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_checkpoint(shape: Shape, folder: Path) -> Weights:
    """Read weights that `save_checkpoint` wrote, as fp32; raises KeyError if a tensor is missing."""
    stored = load_file(str(folder / WEIGHTS_FILE))
    weights = Weights(shape, seed=0)
    values = dict(weights.named_parameters()) | dict(weights.named_buffers())
    with torch.no_grad():
        for name, source, index in _tensors(shape):
            values[source][index].copy_(stored[PREFIX + name])
    return weights


def transformers_state(folder: Path, num_experts: int) -> dict[str, Tensor]:
    """Return the checkpoint under the names of transformers' MiniMaxM3VLForCausalLM, fp32.

    There the experts are fused (gate rows first, then up), dense and shared MLPs too, and the index branch is a module.
    """
    state: dict[str, Tensor] = {}
    stored = {name.removeprefix(PREFIX): value.float() for name, value in load_file(str(folder / WEIGHTS_FILE)).items()}
    for name, value in stored.items():
        if ".experts." in name or ".up_proj." in name:
            continue
        target = name.replace(".block_sparse_moe.", ".mlp.").replace(".self_attn.index_", ".self_attn.indexer.")
        if ".gate_proj." in name:
            target = target.replace(".gate_proj.", ".gate_up_proj.")
            value = torch.cat([value, stored[name.replace(".gate_proj.", ".up_proj.")]])
        target = target.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")
        state[target] = value
    for name in stored:
        if not name.endswith(".experts.0.w1.weight"):
            continue
        base = name.removesuffix("0.w1.weight")
        each = {part: [stored[f"{base}{e}.{part}.weight"] for e in range(num_experts)] for part in ("w1", "w2", "w3")}
        target = base.replace(".block_sparse_moe.", ".mlp.").removesuffix(".")
        state[f"{target}.gate_up_proj"] = torch.cat([torch.stack(each["w1"]), torch.stack(each["w3"])], 1)
        state[f"{target}.down_proj"] = torch.stack(each["w2"])
    return state


def _dtype(source: str) -> torch.dtype:
    return torch.float32 if source.startswith("router") else torch.bfloat16


def _tensors(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (official name without prefix, parameter, index into it) of every tensor."""
    yield "model.embed_tokens.weight", "embed", ()
    yield "lm_head.weight", "head", ()
    yield "model.norm.weight", "norm", ()
    for layer in range(shape.num_layers):
        base = f"model.layers.{layer}."
        yield base + "input_layernorm.weight", "norm_in", (layer,)
        yield base + "post_attention_layernorm.weight", "norm_post", (layer,)
        for part in ("q", "k", "v", "o"):
            yield f"{base}self_attn.{part}_proj.weight", part, (layer,)
        for part in ("q", "k"):
            yield f"{base}self_attn.{part}_norm.weight", f"{part}_norm", (layer,)
        if not shape.is_sparse(layer):
            for part in ("gate", "up", "down"):
                yield f"{base}mlp.{part}_proj.weight", part, (layer,)
            continue
        sparse = layer - shape.num_dense_layers
        for part in ("index_q", "index_k"):
            yield f"{base}self_attn.{part}_proj.weight", part, (sparse,)
            yield f"{base}self_attn.{part}_norm.weight", f"{part}_norm", (sparse,)
        moe = base + "block_sparse_moe."
        yield moe + "gate.weight", "router", (sparse,)
        yield moe + "e_score_correction_bias", "router_bias", (sparse,)
        for expert in range(shape.num_experts):
            for part in ("w1", "w2", "w3"):
                yield f"{moe}experts.{expert}.{part}.weight", part, (sparse, expert)
        for part, source in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            yield f"{moe}shared_experts.{part}_proj.weight", source, (sparse, shape.num_experts)


def _draft_tensors(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (official name, parameter, index into it) of every tensor of the drafter."""
    yield "fc.weight", "fc", ()
    for state in range(len(shape.aux_layers)):
        yield f"fc_norm.{state}.weight", "fc_norm", (state,)
    norms = (
        ("input_layernorm", "token_norm"),
        ("hidden_norm", "hidden_norm"),
        ("post_attention_layernorm", "post_norm"),
    )
    for name, source in norms:
        yield f"layers.0.{name}.weight", source, ()
    for part in ("q", "k", "v", "o"):
        yield f"layers.0.self_attn.{part}_proj.weight", part, ()
    for part in ("gate", "up", "down"):
        yield f"layers.0.mlp.{part}_proj.weight", part, ()
    yield "norm.weight", "norm", ()


def _draft_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_length,
        "intermediate_size": shape.dense_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
    }


def _config(shape: Shape, bos: int, eos: int) -> dict[str, Any]:
    frequency = [int(shape.is_sparse(layer)) for layer in range(shape.num_layers)]
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_length,
        "intermediate_size": shape.expert_width,
        "dense_intermediate_size": shape.dense_width,
        "shared_intermediate_size": shape.expert_width,
        "n_shared_experts": 1,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_layer_freq": frequency,
        "hidden_act": "swigluoai",
        "swiglu_alpha": shape.swiglu_alpha,
        "swiglu_limit": shape.swiglu_limit,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "attention_output_gate": False,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": shape.routed_scale,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_attention_freq": frequency,
            "sparse_disable_index_value": frequency,
            "sparse_num_index_heads": shape.num_groups,
            "sparse_index_dim": shape.index_dim,
            "sparse_block_size": shape.block,
            "sparse_topk_blocks": shape.topk_blocks,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_score_type": "max",
        },
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
