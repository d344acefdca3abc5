"""Eagle3: a drafter of one layer that guesses the token after next from the target's hidden states.

The slot of position p has the token u at index p+1 and a hidden input g. With r_L the target's residual stream after
L layers and plain norms, RMS(x) = x / |x|_rms * w:

    g = fc [RMS(r_a), RMS(r_b), RMS(r_c)]          where the target has run; in a single step, what the slot before left
    z = [RMS(embed(u)), RMS(g)]
    x = g + Wo Attn(W z)                           q and k rotated at p over the whole head
    x = x + Wd (silu(Wg RMS(x)) * Wu RMS(x))
    y = RMS(x);  draft = argmax(head y)            a guess for the token at index p+2

A single step takes y (EAGLE 3.1) or x (classic Eagle3). The layer's keys and values are stored at index p+1 in the
target's cache, see `tandem.spec`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.core import layout
from tandem.models.checkpoint import Weights
from tandem.models.eagle3_config import Eagle3Config
from tandem.models.eagle3_weights import EMBEDDING, HEAD, Eagle3Weights
from tandem.models.layers.attention import ProjectionGeometry
from tandem.models.layers.mlp import Silu
from tandem.models.layers.norms import RmsNorm
from tandem.models.layers.ops import Ops
from tandem.models.layers.rotary import Rotary
from tandem.models.minimax_m3 import MiniMaxM3
from tandem.models.tapes import TapedPasses
from tandem.msa import AttendedTokens, AttentionBackend, LayerGeometry


def tile_specs(config: Eagle3Config, layer: int, kv_dtype: layout.ElementType) -> list[layout.TileSpec]:
    """Return what the drafter keeps per token, K and V of `layer`: the number of the target's layers."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return [layout.TileSpec(layer, role, kv_dtype, heads, dim) for role in (layout.Role.K, layout.Role.V)]


def attention_geometry(config: Eagle3Config, layer: int) -> LayerGeometry:
    """Return how the draft layer attends: everything before it, but index 0, which no slot is stored at."""
    return LayerGeometry(layer, config.num_attention_heads, config.head_dim**-0.5, first_index_attended=1)


class DraftedTokens(AttendedTokens, Protocol):
    """Draft slots as attention sees them; `position` [T] int32 is what they are rotated at."""

    @property
    def position(self) -> Tensor:
        """Position of each slot; 0 for padding."""


class DraftOutput(NamedTuple):
    """What a pass leaves for each slot, both [T, H]: `carried` is the hidden input of a single step, `normed` is y."""

    carried: Tensor
    normed: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """How the drafter reads and names tokens.

    `embed` maps ids int32 [T] to [T, H]; `logits` maps y [N, H] to fp32 [N, draft vocabulary]; `to_target` int32
    [draft vocabulary] is the target's id of each draft id, None where they are the same.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    to_target: Tensor | None


class Eagle3:
    """The drafter on one rank. Activations and matrices have `dtype`, norms are fp32 in weights and sums.

    Attributes:
        config: the drafter's configuration.
        layer: its layer in the cache.
        aux_layers: the target's layers run before each state that it takes: the target's `capture`.
        vocabulary: how it reads and names tokens.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Weights,
        vocabulary: Vocabulary,
        layer: int,
        aux_layers: tuple[int, ...],
        dtype: torch.dtype,
        ops: Ops,
    ) -> None:
        self.config = config
        self.layer = layer
        self.aux_layers = aux_layers
        self.vocabulary = vocabulary

        def norm(name: str) -> RmsNorm:
            return ops.rms_norm(weights.read(f"{name}.weight", torch.float32), config.rms_norm_eps, one_plus=False)

        def rows(*names: str) -> Tensor:
            return weights.read_rows([f"layers.0.{name}_proj.weight" for name in names], dtype)

        self._tapes = TapedPasses(ops.kernels_only)
        self._memory: dict[int, _PassMemory] = {}
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(aux_layers))] if config.fc_norm else None
        self._joined_norm = norm("input_norm") if config.norm_before_fc else None
        self._fc = ops.linear(weights.read("fc.weight", dtype))
        self._token_norm = norm("layers.0.input_layernorm")
        self._hidden_norm = norm("layers.0.hidden_norm")
        geometry = ProjectionGeometry(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            norms=None,
            index=None,
            eps=config.rms_norm_eps,
            one_plus=False,
        )
        rotary = Rotary(config.head_dim, config.rope_theta, config.max_position_embeddings)
        fused = rows("self_attn.q", "self_attn.k", "self_attn.v")
        self._project = ops.attention_projection(fused, geometry, rotary)
        self._output = ops.linear(rows("self_attn.o"))
        self._post_norm = norm("layers.0.post_attention_layernorm")
        self._mlp = ops.gated_mlp(rows("mlp.gate", "mlp.up"), rows("mlp.down"), Silu())
        self._final_norm = norm("norm")

    def first_hidden(self, captured: Sequence[Tensor]) -> Tensor:
        """Return g [T, H] of the slots whose target states, [T, H] for each of `aux_layers`, are `captured`."""
        if self._fc_norms is None:
            joined = torch.cat(list(captured), dim=1)
        else:
            num_tokens, width = captured[0].shape
            joined = captured[0].new_empty((num_tokens, width * len(captured)))
            for i, (norm, state) in enumerate(zip(self._fc_norms, captured, strict=True)):
                norm(state, joined[:, i * width : (i + 1) * width])
        return self._fc(joined if self._joined_norm is None else self._joined_norm(joined))

    def forward(
        self, token_ids: Tensor, hidden: Tensor, slots: DraftedTokens, attention: AttentionBackend
    ) -> DraftOutput:
        """Run the layer on slots with tokens `token_ids` [T] int32 and hidden inputs `hidden` [T, H].

        Writes their keys and values. `hidden` is used up: it may hold x afterwards.
        """
        embedded = self.vocabulary.embed(token_ids)
        tapes = self._tapes.over(attention, len(token_ids))
        if tapes is None:
            x, y = hidden, self._run(embedded, hidden, slots, attention)
        else:
            memory = self._memory_for(hidden)
            memory.take(embedded, hidden, slots)
            tapes.begin_pass(1)
            run = partial(self._run, memory.embedded, memory.x, memory, attention)
            x, y = memory.x, tapes.run(len(token_ids), run).clone()
        if self.config.norm_output:
            return DraftOutput(y, y)
        return DraftOutput(x if tapes is None else x.clone(), y)

    def _run(self, embedded: Tensor, x: Tensor, slots: DraftedTokens, attention: AttentionBackend) -> Tensor:
        """Run the layer on `x` [T, H], in place, and return y."""
        width = embedded.shape[1]
        z = embedded.new_empty((embedded.shape[0], 2 * width))
        self._token_norm(embedded, z[:, :width])
        self._hidden_norm(x, z[:, width:])
        q, k, v, _, _ = self._project(z, slots.position)
        attention.write(self.layer, k, v, None, slots)
        attended = self._output(attention.attend(self.layer, q, None, slots).flatten(1))
        return self._final_norm.add(self._mlp(self._post_norm.add(attended, x)), x)

    def _memory_for(self, hidden: Tensor) -> _PassMemory:
        num_tokens = len(hidden)
        if num_tokens not in self._memory:
            # Steps run in inference mode or outside of it, and both write here.
            with torch.inference_mode(False):
                self._memory[num_tokens] = _PassMemory(hidden)
        return self._memory[num_tokens]

    def propose(self, normed: Tensor) -> Tensor:
        """Return the likeliest draft of each y [N, H] as the target's id, int32 [N].

        Of equally likely ones it is the lowest id of the draft vocabulary.
        """
        draft = self.vocabulary.logits(normed).max(dim=-1).indices
        to_target = self.vocabulary.to_target
        return draft.to(torch.int32) if to_target is None else to_target.index_select(0, draft)


class _PassMemory:
    """What a taped pass reads, always in the same memory for one number of tokens: `DraftedTokens` as well."""

    def __init__(self, like: Tensor) -> None:
        self.embedded = torch.empty_like(like)
        self.x = torch.empty_like(like)
        self._slots = torch.empty((4, len(like)), dtype=torch.int32)
        self.token_seat, self.position, self.write_index, self.kv_len = self._slots

    def take(self, embedded: Tensor, x: Tensor, slots: DraftedTokens) -> None:
        self.embedded.copy_(embedded)
        self.x.copy_(x)
        torch.stack((slots.token_seat, slots.position, slots.write_index, slots.kv_len), out=self._slots)


def load_drafter(
    path: str | Path,
    target: MiniMaxM3,
    target_weights: Weights,
    dtype: torch.dtype,
    ops: Ops,
    aux_layers: Sequence[int] | None = None,
) -> Eagle3:
    """Load the drafter in the folder `path` for `target`, whose checkpoint is `target_weights`.

    An embedding or head that the checkpoint lacks, or has with the same bits, is the target's own. `aux_layers`
    replaces the checkpoint's list of captured layers. Raises `CheckpointError` that names the key or tensors at fault.
    """
    config = Eagle3Config.from_pretrained(path)
    config.require_fit(target.config, path)
    layer = target.config.num_hidden_layers
    captured = config.captured_layers(layer, aux_layers)
    stored = Eagle3Weights(Path(path), config, len(captured))
    vocabulary = _vocabulary(stored, target, target_weights, dtype, ops)
    return Eagle3(config, stored.weights, vocabulary, layer, captured, dtype, ops)


def _vocabulary(
    stored: Eagle3Weights, target: MiniMaxM3, target_weights: Weights, dtype: torch.dtype, ops: Ops
) -> Vocabulary:
    embed: Callable[[Tensor], Tensor] = target.embed
    logits: Callable[[Tensor], Tensor] = target.logits
    to_target = stored.draft_to_target()
    if stored.has_embedding:
        own = stored.weights.read(EMBEDDING, dtype)
        if not torch.equal(own, target_weights.read("model.embed_tokens.weight", dtype)):
            embed = _Embedding(own)
    if stored.has_head:
        own = stored.weights.read(HEAD, dtype)
        if to_target is not None or not torch.equal(own, target_weights.read("lm_head.weight", dtype)):
            logits = _Head(own, ops)
    return Vocabulary(embed, logits, to_target)


class _Embedding:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(token_ids, self._weight)


class _Head:
    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self._linear = ops.linear(weight)

    def __call__(self, normed: Tensor) -> Tensor:
        return self._linear(normed.float())
