"""The tensors of a MiniMax-M3 checkpoint: names (without the `language_model.` prefix), shapes and kinds."""

from collections.abc import Iterator
from pathlib import Path

from tandem.models.checkpoint import CheckpointWeights, WeightKind, WeightSpec
from tandem.models.config import MiniMaxM3Config
from tandem.models.safetensors_files import SafetensorsFiles

TEXT_PREFIX = "language_model."
# The vision part of the released checkpoint, which the text model does not use.
IGNORED_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")


def weight_specs(config: MiniMaxM3Config) -> list[WeightSpec]:
    """Return every weight of the text model, in the order in which the model reads them."""
    return list(_specs(config))


def open_weights(folder: Path, config: MiniMaxM3Config) -> CheckpointWeights:
    """Return the weights in `folder`, checked against `config`. Raises `CheckpointError`."""
    return CheckpointWeights(SafetensorsFiles(folder, TEXT_PREFIX), weight_specs(config), IGNORED_PREFIXES)


def _specs(config: MiniMaxM3Config) -> Iterator[WeightSpec]:
    hidden = config.hidden_size
    yield _matrix("model.embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield _vector(f"{prefix}input_layernorm.weight", hidden)
        yield from _attention(config, f"{prefix}self_attn.", config.sparse_layers[layer])
        yield _vector(f"{prefix}post_attention_layernorm.weight", hidden)
        if config.moe_layers[layer]:
            yield from _experts(config, f"{prefix}block_sparse_moe.")
        else:
            yield from _gated_mlp(f"{prefix}mlp.", hidden, config.dense_intermediate_size)
    yield _vector("model.norm.weight", hidden)
    yield _matrix("lm_head.weight", config.vocab_size, hidden)


def _attention(config: MiniMaxM3Config, prefix: str, sparse: bool) -> Iterator[WeightSpec]:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield _matrix(f"{prefix}q_proj.weight", queries, hidden)
    yield _matrix(f"{prefix}k_proj.weight", keys, hidden)
    yield _matrix(f"{prefix}v_proj.weight", keys, hidden)
    yield _vector(f"{prefix}q_norm.weight", config.head_dim)
    yield _vector(f"{prefix}k_norm.weight", config.head_dim)
    if sparse:
        yield _matrix(f"{prefix}index_q_proj.weight", config.num_index_heads * config.index_dim, hidden)
        yield _matrix(f"{prefix}index_k_proj.weight", config.index_dim, hidden)
        yield _vector(f"{prefix}index_q_norm.weight", config.index_dim)
        yield _vector(f"{prefix}index_k_norm.weight", config.index_dim)
    yield _matrix(f"{prefix}o_proj.weight", hidden, queries)


def _experts(config: MiniMaxM3Config, prefix: str) -> Iterator[WeightSpec]:
    hidden, width = config.hidden_size, config.intermediate_size
    yield WeightSpec(f"{prefix}gate.weight", (config.num_local_experts, hidden), WeightKind.ROUTER)
    yield WeightSpec(f"{prefix}e_score_correction_bias", (config.num_local_experts,), WeightKind.ROUTER)
    for expert in range(config.num_local_experts):
        yield _matrix(f"{prefix}experts.{expert}.w1.weight", width, hidden)
        yield _matrix(f"{prefix}experts.{expert}.w3.weight", width, hidden)
        yield _matrix(f"{prefix}experts.{expert}.w2.weight", hidden, width)
    yield from _gated_mlp(f"{prefix}shared_experts.", hidden, config.shared_intermediate_size)


def _gated_mlp(prefix: str, hidden: int, width: int) -> Iterator[WeightSpec]:
    yield _matrix(f"{prefix}gate_proj.weight", width, hidden)
    yield _matrix(f"{prefix}up_proj.weight", width, hidden)
    yield _matrix(f"{prefix}down_proj.weight", hidden, width)


def _matrix(name: str, rows: int, columns: int) -> WeightSpec:
    return WeightSpec(name, (rows, columns), WeightKind.MATRIX)


def _vector(name: str, length: int) -> WeightSpec:
    return WeightSpec(name, (length,), WeightKind.VECTOR)
