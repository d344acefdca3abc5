"""Tiny Eagle3 checkpoints of every kind, and their equations in double precision, one slot at a time."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.models import MiniMaxM3, MiniMaxM3Config, Ops, load_model
from tandem.models.eagle3 import Eagle3, load_drafter
from tandem.models.minimax_m3_weights import open_weights
from tests.python.models.support import Shape, random_weights, text_config, write_checkpoint

AUX_LAYERS = (1, 2, 4)
TARGET = Shape(layers="ddss", hidden=64, heads=4, kv_heads=2, head_dim=32, rotary_dim=16, vocab=64, block=16, topk=2)


@dataclass(frozen=True)
class DraftShape:
    """A tiny drafter for `TARGET`; EAGLE 3.1 by default."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 96
    vocab: int = TARGET.vocab
    draft_vocab: int | None = None
    hidden: int = TARGET.hidden
    fc_norm: bool = True
    norm_before_fc: bool = False
    norm_output: bool = True
    own_embedding: bool = False
    own_head: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


CLASSIC = DraftShape(draft_vocab=40, fc_norm=False, norm_output=False, own_embedding=True, own_head=True)


def draft_config(shape: DraftShape) -> dict[str, Any]:
    """The drafter's `config.json` with the keys of the published heads."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "norm_before_residual": False,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "norm_before_fc": shape.norm_before_fc,
        },
    } | shape.extra


def draft_tensors(shape: DraftShape, seed: int) -> dict[str, Tensor]:
    """Every tensor under its present name, bf16; norms far from neutral, matrices keep activations of order one."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (gain * torch.randn((rows, columns), generator=rng) * columns**-0.5).bfloat16()

    def vector(length: int) -> Tensor:
        return (1.0 + 0.3 * torch.randn(length, generator=rng)).bfloat16()

    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "layers.0.input_layernorm.weight": vector(hidden),
        "layers.0.hidden_norm.weight": vector(hidden),
        "layers.0.post_attention_layernorm.weight": vector(hidden),
        # A gain on queries makes attention sharp, so that one wrong entry shows in the drafts.
        "layers.0.self_attn.q_proj.weight": matrix(queries, 2 * hidden, 3.0),
        "layers.0.self_attn.k_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, queries, 2.0),
        "layers.0.mlp.gate_proj.weight": matrix(shape.width, hidden),
        "layers.0.mlp.up_proj.weight": matrix(shape.width, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, shape.width),
        "norm.weight": vector(hidden),
    }
    if shape.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": vector(hidden) for i in range(3)}
    if shape.norm_before_fc:
        tensors["input_norm.weight"] = vector(3 * hidden)
    if shape.own_embedding:
        tensors["embed_tokens.weight"] = torch.randn((shape.vocab, hidden), generator=rng).bfloat16()
    if shape.own_head:
        tensors["lm_head.weight"] = matrix(shape.draft_vocab or shape.vocab, hidden)
    if shape.draft_vocab is not None and shape.draft_vocab != shape.vocab:
        targets = torch.randperm(shape.vocab, generator=rng)[: shape.draft_vocab].sort().values
        tensors["d2t"] = targets - torch.arange(shape.draft_vocab)
        tensors["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, targets, True)
    return tensors


@dataclass(frozen=True)
class Pair:
    """A target, its drafter and the tensors that both were loaded from."""

    target: MiniMaxM3
    drafter: Eagle3
    target_tensors: dict[str, Tensor]
    tensors: dict[str, Tensor]


def load_pair(folder: Path, shape: DraftShape, ops: Ops, seed: int, tensors: dict[str, Tensor] | None = None) -> Pair:
    """Write a random target and a drafter of `shape` (or of `tensors`) under `folder`, and load both in fp32."""
    text = text_config(TARGET)
    config = MiniMaxM3Config.from_dict(text)
    target_tensors = random_weights(config, seed)
    write_checkpoint(folder / "target", text, target_tensors)
    tensors = draft_tensors(shape, seed + 1) if tensors is None else tensors
    write_checkpoint(folder / "eagle3", draft_config(shape), tensors, prefix="")
    target = load_model(folder / "target", torch.float32, ops)
    weights = open_weights(folder / "target", config)
    drafter = load_drafter(folder / "eagle3", target, weights, torch.float32, ops)
    return Pair(target, drafter, target_tensors, tensors)


class Oracle:
    """The drafter's equations in double precision, without a cache: slots are lists of keys and values.

    `aux` are the target's states of a whole text, each [T, H].
    """

    def __init__(self, shape: DraftShape, pair: Pair, text: list[int], aux: list[Tensor]) -> None:
        self._shape = shape
        self._weights = {name: tensor.double() for name, tensor in pair.tensors.items()}
        own = self._weights
        self._embedding = own.get("embed_tokens.weight", pair.target_tensors["model.embed_tokens.weight"].double())
        self._head = own.get("lm_head.weight", pair.target_tensors["lm_head.weight"].double())
        self._text = text
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.carried: list[Tensor] = []
        self.normed: list[Tensor] = []
        for position in range(len(text) - 1):
            g = self.first_hidden([state[position].double() for state in aux])
            self._remember(self.slot(position, text[position + 1], g, self.keys, self.values))

    def first_hidden(self, states: list[Tensor]) -> Tensor:
        if self._shape.fc_norm:
            states = [self._norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
        joined = torch.cat(states)
        if self._shape.norm_before_fc:
            joined = self._norm(joined, "input_norm.weight")
        return self._weights["fc.weight"] @ joined

    def slot(
        self, position: int, token: int, g: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(key, value, carried, y) of one slot that sees `keys` and `values` before it."""
        shape, prefix = self._shape, "layers.0."
        embedded = self._norm(self._embedding[token], f"{prefix}input_layernorm.weight")
        z = torch.cat((embedded, self._norm(g, f"{prefix}hidden_norm.weight")))
        q, k, v = (
            (self._weights[f"{prefix}self_attn.{part}_proj.weight"] @ z).view(-1, shape.head_dim) for part in "qkv"
        )
        q, k = self._rotate(q, position), self._rotate(k, position)
        seen_keys, seen_values = torch.stack([*keys, k]), torch.stack([*values, v])
        group = shape.heads // shape.kv_heads
        heads = []
        for head in range(shape.heads):
            scores = seen_keys[:, head // group] @ q[head] / math.sqrt(shape.head_dim)
            heads.append(scores.softmax(0) @ seen_values[:, head // group])
        x = g + self._weights[f"{prefix}self_attn.o_proj.weight"] @ torch.cat(heads)
        m = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (self._weights[f"{prefix}mlp.{part}_proj.weight"] @ m for part in ("gate", "up"))
        x = x + self._weights[f"{prefix}mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        y = self._norm(x, "norm.weight")
        return k, v, y if shape.norm_output else x, y

    def propose(self, y: Tensor) -> tuple[int, float]:
        """The draft as the target's id, and by how much its logit is the highest."""
        logits = self._head @ y
        best = logits.topk(2).values
        draft = int(logits.argmax())
        offset = int(self._weights["d2t"][draft]) if "d2t" in self._weights else 0
        return draft + offset, float(best[0] - best[1])

    def round(self, num_known: int, draft_len: int) -> list[tuple[int, float]]:
        """The drafts, each with its margin, once the target has `num_known` tokens in its cache."""
        last = num_known - 1
        keys, values = self.keys[:num_known], self.values[:num_known]
        carried, y = self.carried[last], self.normed[last]
        drafts = [self.propose(y)]
        for step in range(1, draft_len):
            key, value, carried, y = self.slot(last + step, drafts[-1][0], carried, keys, values)
            keys, values = [*keys, key], [*values, value]
            drafts.append(self.propose(y))
        return drafts

    def _remember(self, slot: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        for kept, new in zip((self.keys, self.values, self.carried, self.normed), slot, strict=True):
            kept.append(new)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * self._weights[name]

    def _rotate(self, heads: Tensor, position: int) -> Tensor:
        """Pair dim i with dim i + D/2 of heads [n, D] and turn it by position * theta^(-2i/D)."""
        half = self._shape.head_dim // 2
        turn = torch.polar(torch.ones(half).double(), position * 10000.0 ** (-torch.arange(half).double() / half))
        turned = torch.complex(heads[:, :half], heads[:, half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=1)
