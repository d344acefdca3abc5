"""MiniMax-M3's text model: full attention in some layers, attention over selected blocks in others; experts in most.

With h the residual stream, for layer l:  h = h + Attn(RMS(h)),  h = h + FFN(RMS(h));  logits = lm_head RMS(h).
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tandem.core import layout
from tandem.models.checkpoint import Weights
from tandem.models.config import MiniMaxM3Config
from tandem.models.layers.attention import HeadNorms, IndexBranch, ProjectionGeometry
from tandem.models.layers.mlp import GatedMlp, SwigluOai
from tandem.models.layers.moe import Moe, MoeWeights, Routing
from tandem.models.layers.norms import RmsNorm
from tandem.models.layers.ops import Ops
from tandem.models.layers.rotary import Rotary
from tandem.models.minimax_m3_weights import open_weights
from tandem.models.tapes import TapedPasses
from tandem.msa import AttentionBackend, LayerGeometry, SparseGeometry, StepMetadata


def tile_specs(
    config: MiniMaxM3Config, kv_dtype: layout.ElementType, index_dtype: layout.ElementType | None = None
) -> list[layout.TileSpec]:
    """Return what the model keeps per token: K and V of every layer, and of a sparse one an index key for all heads.

    Index keys have `index_dtype`, by default `kv_dtype`; beside packed 4-bit K and V, which carry scale tiles, BF16.
    """
    packed = kv_dtype == layout.ElementType.NVFP4
    index_dtype = index_dtype or (layout.ElementType.BF16 if packed else kv_dtype)
    heads, dim = config.num_key_value_heads, config.head_dim
    tiles = []
    for layer in range(config.num_hidden_layers):
        tiles += [layout.TileSpec(layer, role, kv_dtype, heads, dim) for role in (layout.Role.K, layout.Role.V)]
        if packed:
            tiles += [
                layout.TileSpec(layer, role, layout.ElementType.FP8_E4M3, heads, dim // 16)
                for role in (layout.Role.K_SCALE, layout.Role.V_SCALE)
            ]
        if config.sparse_layers[layer]:
            tiles.append(layout.TileSpec(layer, layout.Role.INDEX_K, index_dtype, 1, config.index_dim, replicated=True))
    return tiles


def attention_geometry(config: MiniMaxM3Config) -> list[LayerGeometry]:
    """Return how each layer attends, for an `AttentionBackend`."""
    sparse = SparseGeometry(config.block_size, config.topk_blocks, config.local_blocks)
    return [
        LayerGeometry(layer, config.num_attention_heads, config.head_dim**-0.5, sparse if is_sparse else None)
        for layer, is_sparse in enumerate(config.sparse_layers)
    ]


class MiniMaxM3:
    """The model on one rank. Activations and matrices have `dtype`; norms and routers are fp32 in weights and sums."""

    def __init__(self, config: MiniMaxM3Config, weights: Weights, dtype: torch.dtype, ops: Ops) -> None:
        self.config = config
        self.dtype = dtype
        rotary = Rotary(config.rotary_dim, config.rope_theta, config.max_position_embeddings)
        self._embedding = weights.read("model.embed_tokens.weight", dtype)
        self._layers = [_Layer(config, layer, weights, dtype, ops, rotary) for layer in range(config.num_hidden_layers)]
        final_norm = _norm("model.norm.weight", config, weights, ops)
        self._input_norms = [*(layer.input_norm for layer in self._layers), final_norm]
        self._lm_head = ops.linear(weights.read("lm_head.weight", dtype))
        self._tapes = TapedPasses(ops.kernels_only)
        self._streams: dict[int, Tensor] = {}

    def forward(
        self, token_ids: Tensor, meta: StepMetadata, attention: AttentionBackend, capture: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run one step's tokens and return (hidden, captured).

        `token_ids` [T] int32 and `meta` describe the same tokens; `attention` holds the cache that their keys and
        values are written to. `hidden` [T, H] is the final-normed stream, the input of `logits`. `captured` has, for
        each L in `capture` (ascending, 0 to the number of layers), the residual stream after L layers, before any
        norm, [T, H].
        """
        num_layers = len(self._layers)
        if list(capture) != sorted(set(capture)) or any(n not in range(num_layers + 1) for n in capture):
            raise ValueError(
                f"capture is {tuple(capture)}; allowed are distinct ascending numbers of layers run, 0 to {num_layers}"
            )
        tapes = self._tapes.over(attention, len(token_ids))
        h = self.embed(token_ids) if tapes is None else self._embed_in_place(token_ids)
        a, captured = h, []
        parts = list(pairwise((0, *(n for n in capture if 0 < n < num_layers), num_layers)))
        if tapes is not None:
            tapes.begin_pass(len(parts))
        for first, last in parts:
            if first in capture:
                captured.append(h.clone())
            run = partial(self._run_layers, first, last, a, h, meta, attention)
            a = run() if tapes is None else tapes.run((tuple(capture), last, len(token_ids), meta), run)
        if num_layers in capture:
            captured.append(h.clone())
        return a if tapes is None else a.clone(), captured

    def _run_layers(
        self, first: int, last: int, a: Tensor, h: Tensor, meta: StepMetadata, attention: AttentionBackend
    ) -> Tensor:
        """Run layers `first` to `last` - 1 on the stream `h`, updated in place, and return the next normed stream.

        `a` is what the layer before `first` returned; the first layer has none.
        """
        if first == 0:
            a = self._input_norms[0](h)
        for index, layer in enumerate(self._layers[first:last], start=first):
            b = layer.post_norm.add(layer.attend(a, meta, attention), h)
            a = self._input_norms[index + 1].add(layer.feed_forward(b), h)
        return a

    def _embed_in_place(self, token_ids: Tensor) -> Tensor:
        """The embeddings [T, H], always in the same memory for one T."""
        num_tokens = len(token_ids)
        if num_tokens not in self._streams:
            # Steps run in inference mode or outside of it, and both write here.
            with torch.inference_mode(False):
                self._streams[num_tokens] = self._embedding.new_empty((num_tokens, self._embedding.shape[1]))
        return torch.index_select(self._embedding, 0, token_ids, out=self._streams[num_tokens])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [T, H] of `token_ids` [T] int32."""
        return torch.nn.functional.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocabulary] fp32 of rows of `forward`'s hidden [N, H]."""
        return self._lm_head(hidden.float())


class _Layer:
    """One decoder layer. Its two norms add the branch before them to the stream, hence belong to the model's loop."""

    def __init__(
        self, config: MiniMaxM3Config, index: int, weights: Weights, dtype: torch.dtype, ops: Ops, rotary: Rotary
    ) -> None:
        prefix = f"model.layers.{index}."
        self._index = index
        self._sparse = config.sparse_layers[index]
        self.input_norm = _norm(f"{prefix}input_layernorm.weight", config, weights, ops)
        self.post_norm = _norm(f"{prefix}post_attention_layernorm.weight", config, weights, ops)

        parts = ("q", "k", "v", "index_q", "index_k") if self._sparse else ("q", "k", "v")
        fused = weights.read_rows([f"{prefix}self_attn.{part}_proj.weight" for part in parts], dtype)
        geometry = _geometry(config, f"{prefix}self_attn.", self._sparse, weights)
        self._project = ops.attention_projection(fused, geometry, rotary)
        self._output = ops.linear(weights.read(f"{prefix}self_attn.o_proj.weight", dtype))

        self.feed_forward: GatedMlp | Moe
        activation = SwigluOai(config.swiglu_alpha, config.swiglu_limit)
        if config.moe_layers[index]:
            routing = Routing(config.num_experts_per_tok, config.routed_scaling_factor)
            moe_weights = _moe_weights(config, f"{prefix}block_sparse_moe.", weights, dtype)
            self.feed_forward = ops.moe(moe_weights, routing, activation)
        else:
            gate_up, down = _mlp_weights(f"{prefix}mlp.", weights, dtype)
            self.feed_forward = ops.gated_mlp(gate_up, down, activation)

    def attend(self, a: Tensor, meta: StepMetadata, attention: AttentionBackend) -> Tensor:
        """Return Wo Attn(a) [T, H] for the normed stream `a` [T, H]."""
        q, k, v, index_q, index_k = self._project(a, meta.position)
        attention.write(self._index, k, v, index_k, meta)
        blocks = None if index_q is None else attention.select(self._index, index_q, meta)
        return self._output(attention.attend(self._index, q, blocks, meta).flatten(1))


def _norm(name: str, config: MiniMaxM3Config, weights: Weights, ops: Ops) -> RmsNorm:
    return ops.rms_norm(weights.read(name, torch.float32), config.rms_norm_eps, one_plus=True)


def _geometry(config: MiniMaxM3Config, prefix: str, sparse: bool, weights: Weights) -> ProjectionGeometry:
    def vector(name: str) -> Tensor:
        return weights.read(f"{prefix}{name}.weight", torch.float32)

    index = None
    if sparse:
        index = IndexBranch(config.num_index_heads, config.index_dim, vector("index_q_norm"), vector("index_k_norm"))
    return ProjectionGeometry(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norms=HeadNorms(vector("q_norm"), vector("k_norm")),
        index=index,
        eps=config.rms_norm_eps,
        one_plus=True,
    )


def _mlp_weights(prefix: str, weights: Weights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = weights.read_rows([f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"], dtype)
    return gate_up, weights.read(f"{prefix}down_proj.weight", dtype)


def _moe_weights(config: MiniMaxM3Config, prefix: str, weights: Weights, dtype: torch.dtype) -> MoeWeights:
    experts = [f"{prefix}experts.{expert}." for expert in range(config.num_local_experts)]
    shared_gate_up, shared_down = _mlp_weights(f"{prefix}shared_experts.", weights, dtype)
    return MoeWeights(
        gate=weights.read(f"{prefix}gate.weight", torch.float32),
        bias=weights.read(f"{prefix}e_score_correction_bias", torch.float32),
        gate_up=[weights.read_rows([f"{expert}w1.weight", f"{expert}w3.weight"], dtype) for expert in experts],
        down=[weights.read(f"{expert}w2.weight", dtype) for expert in experts],
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
    )


def load_model(path: str | Path, dtype: torch.dtype, ops: Ops) -> MiniMaxM3:
    """Load the checkpoint folder `path`. Raises `CheckpointError` that names the file, key or tensors at fault."""
    config = MiniMaxM3Config.from_pretrained(path)
    return MiniMaxM3(config, open_weights(Path(path), config), dtype, ops)
