"""The model in the form that training wants.

Stacked fp32 parameters, bf16 arithmetic, one stream of tokens for everything that works on single tokens, and attention
over two sorts of rows (packed word problems, documents).

Shapes: N tokens of a step, R rows of length C, B documents of length T, H hidden, Q query heads, G groups, D head
width, E experts, n blocks of a document.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tools.demo_model.shape import Shape

MASKED = -1e30


class Weights(nn.Module):
    """All parameters, layers stacked; the last expert of `w1`, `w2`, `w3` is the shared one."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        layers, dense, sparse = shape.num_layers, shape.num_dense_layers, shape.num_sparse_layers
        hidden, head, index = shape.hidden, shape.head_dim, shape.index_dim
        experts = shape.num_experts + 1

        def normal(*size: int, std: float | None = None) -> nn.Parameter:
            scale = size[-1] ** -0.5 if std is None else std
            return nn.Parameter(torch.randn(size, generator=generator) * scale)

        def zeros(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size))

        self.embed = normal(shape.vocab_size, hidden, std=0.5)
        self.head = normal(shape.vocab_size, hidden, std=0.02)
        self.norm = zeros(hidden)
        self.norm_in, self.norm_post = zeros(layers, hidden), zeros(layers, hidden)
        self.q = normal(layers, shape.num_heads * head, hidden)
        self.k = normal(layers, shape.num_groups * head, hidden)
        self.v = normal(layers, shape.num_groups * head, hidden)
        self.o = zeros(layers, hidden, shape.num_heads * head)
        self.q_norm, self.k_norm = zeros(layers, head), zeros(layers, head)
        self.index_q = normal(sparse, shape.num_groups * index, hidden)
        self.index_k = normal(sparse, index, hidden)
        self.index_q_norm, self.index_k_norm = zeros(sparse, index), zeros(sparse, index)
        self.gate = normal(dense, shape.dense_width, hidden)
        self.up = normal(dense, shape.dense_width, hidden)
        self.down = zeros(dense, hidden, shape.dense_width)
        self.w1 = normal(sparse, experts, shape.expert_width, hidden)
        self.w3 = normal(sparse, experts, shape.expert_width, hidden)
        self.w2 = zeros(sparse, experts, hidden, shape.expert_width)
        self.router = normal(sparse, shape.num_experts, hidden, std=0.02)
        self.router_bias: Tensor
        self.register_buffer("router_bias", torch.zeros(sparse, shape.num_experts))

    def layer(self, stacked: dict[str, tuple[Tensor, ...]], layer: int) -> dict[str, Tensor]:
        """Return the parameters of one layer by name."""
        dense = self.shape.num_dense_layers
        names = ["norm_in", "norm_post", "q", "k", "v", "o", "q_norm", "k_norm"]
        weights = {name: stacked[name][layer] for name in names}
        if layer < dense:
            weights |= {name: stacked[name][layer] for name in ("gate", "up", "down")}
        else:
            names = ["index_q", "index_k", "index_q_norm", "index_k_norm", "w1", "w2", "w3", "router", "router_bias"]
            weights |= {name: stacked[name][layer - dense] for name in names}
        return weights

    def stacked(self) -> dict[str, tuple[Tensor, ...]]:
        """Return every layer parameter unbound along its layers."""
        whole = ("embed", "head", "norm")
        values = [*self.named_parameters(), *self.named_buffers()]
        return {name: value.unbind(0) for name, value in values if name not in whole}


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with weight 1 + w, in fp32, rounded once to the dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dims of x [N, heads, D] in half-split pairs; cos, sin [N, pairs]."""
    pairs = cos.shape[-1]
    first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * pairs :]], -1)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return g * sigmoid(alpha g) * (u + 1) with g clamped from above and u from both sides."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)


def project(shape: Shape, x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
    """First half of a layer: norm, projections, per-head norms and rope.

    Makes of x [N, H]: q [N, Q, D], k, v [N, G, D], and in sparse layers index_q [N, G, Di], index_k [N, 1, Di].
    """
    a = gemma_norm(x, w["norm_in"], shape.eps)
    out = {}
    for name, width in (("q", shape.head_dim), ("k", shape.head_dim), ("v", shape.head_dim), *_index_parts(shape, w)):
        part = F.linear(a, w[name].to(a.dtype)).unflatten(-1, (-1, width))
        out[name] = part if name == "v" else rotate(gemma_norm(part, w[f"{name}_norm"], shape.eps), cos, sin)
    return out


def _index_parts(shape: Shape, w: dict[str, Tensor]) -> list[tuple[str, int]]:
    return [("index_q", shape.index_dim), ("index_k", shape.index_dim)] if "index_q" in w else []


def finish(shape: Shape, x: Tensor, attended: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Second half of a layer: output projection, MLP or experts. Returns x and, for experts, tokens per expert [E]."""
    x = x + F.linear(attended, w["o"].to(x.dtype))
    b = gemma_norm(x, w["norm_post"], shape.eps)
    if "gate" in w:
        inner = swiglu_oai(
            F.linear(b, w["gate"].to(b.dtype)), F.linear(b, w["up"].to(b.dtype)), shape.swiglu_alpha, shape.swiglu_limit
        )
        return x + F.linear(inner, w["down"].to(b.dtype)), None
    # Every expert is computed for every token and weighted, by zero for most: cheaper at this width than moving tokens.
    scores = torch.sigmoid(F.linear(b.float(), w["router"]))
    chosen = torch.topk(scores + w["router_bias"], shape.experts_per_token, dim=-1).indices
    picked = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    share = scores * picked
    share = share / share.sum(-1, keepdim=True) * shape.routed_scale
    share = torch.cat([share, torch.ones_like(share[:, :1])], -1).to(b.dtype)
    width = shape.expert_width
    gate, up = (F.linear(b, w[name].flatten(0, 1).to(b.dtype)) for name in ("w1", "w3"))
    inner = swiglu_oai(gate, up, shape.swiglu_alpha, shape.swiglu_limit).unflatten(-1, (-1, width)) * share[..., None]
    w2 = w["w2"].transpose(0, 1).flatten(1).to(b.dtype)
    return x + F.linear(inner.flatten(-2), w2), picked.sum(0)


def token_losses(shape: Shape, x: Tensor, targets: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy [N] and logsumexp [N] of the next token, both fp32."""
    logits = F.linear(gemma_norm(x, norm, shape.eps), head.to(x.dtype)).float()
    lse = torch.logsumexp(logits, -1)
    return lse - logits.gather(-1, targets[:, None])[:, 0], lse


def causal_mask(length: int, block: int, device: torch.device) -> BlockMask:
    """Return the causal block mask of rows of one length."""
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device, BLOCK_SIZE=block)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, mask: BlockMask) -> Tensor:
    """Causal attention within the conversations of packed rows: q [R, Q, C, D], segments [R, C]."""

    def same_segment(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        return torch.where(segments[b, q_at] == segments[b, k_at], score, MASKED)

    return _flex(q, k, v, same_segment, mask)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: BlockMask) -> Tensor:
    """Causal attention to the blocks in `visible` bool [B, G, T, n]; q [B, Q, T, D]."""
    heads_per_group = q.shape[1] // k.shape[1]
    block = q.shape[2] // visible.shape[-1]

    def in_visible_block(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        return torch.where(visible[b, h // heads_per_group, q_at, k_at // block], score, MASKED)

    return _flex(q, k, v, in_visible_block, mask)


def attend_all(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Plain causal attention: q [B, Q, T, D]."""
    return _flex(q, k, v, None, mask)


def _flex(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None, mask: BlockMask) -> Tensor:
    out = flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


def dense_segments(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, mask: BlockMask) -> Tensor:
    """Do `attend_segments` without a kernel of its own."""
    return _dense(q, k, v, (segments[:, :, None] == segments[:, None])[:, None])


def dense_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: BlockMask) -> Tensor:
    """Do `attend_blocks` without a kernel of its own."""
    heads_per_group, block = q.shape[1] // k.shape[1], q.shape[2] // visible.shape[-1]
    return _dense(q, k, v, visible.repeat_interleave(heads_per_group, 1).repeat_interleave(block, 3))


def dense_all(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Do `attend_all` without a kernel of its own."""
    return _dense(q, k, v, torch.ones(1, dtype=torch.bool, device=q.device))


def _dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep & causal, enable_gqa=True)


@torch.no_grad()
def select_blocks(shape: Shape, index_q: Tensor, index_k: Tensor, chunk: int = 1024) -> Tensor:
    """Return the blocks each query chooses, bool [B, G, T, n].

    Its own block, and of those before it the top-k - 1 by the largest index score in the block.
    index_q [B, G, T, Di], index_k [B, T, Di] or, with keys of its own for each group, [B, G, T, Di].
    """
    batch, groups, length, _ = index_q.shape
    num_blocks = length // shape.block
    keys = index_k[:, None] if index_k.dim() == 3 else index_k
    block_ids = torch.arange(num_blocks, device=index_q.device)
    chosen = torch.zeros(batch, groups, length, num_blocks, dtype=torch.bool, device=index_q.device)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        scores = index_q[:, :, start:end] @ keys.transpose(-1, -2)
        pooled = scores.unflatten(-1, (num_blocks, shape.block)).amax(-1).float()
        own = torch.arange(start, end, device=index_q.device) // shape.block
        pooled = pooled.masked_fill(block_ids >= own[:, None], -math.inf)
        values, ids = pooled.topk(min(shape.topk_blocks - 1, num_blocks), dim=-1)
        chosen[:, :, start:end].scatter_(-1, ids, values > -math.inf)
        chosen[:, :, start:end] |= block_ids == own[:, None]
    return chosen


@dataclass
class Documents:
    """Documents of a step on the device: [B, T] as in `data.DocumentBatch`, `queries` [B, S]."""

    length: int
    homes: Tensor
    turn_blocks: Tensor
    sources: Tensor
    queries: Tensor


def near_blocks(shape: Shape, documents: Documents) -> Tensor:
    """Return the blocks a query may see outside its home, bool [B, T, n]: from its turn's start, all if in no turn."""
    block_ids = torch.arange(documents.length // shape.block, device=documents.homes.device)
    return block_ids >= documents.turn_blocks[..., None]


def at_home(shape: Shape, documents: Documents, layer: int) -> Tensor:
    """Return where the layer's groups are home to the query's question, bool [B, G, T]; true outside of turns."""
    first = (layer - shape.num_dense_layers) * shape.num_groups
    ids = torch.arange(first, first + shape.num_groups, device=documents.homes.device)[:, None]
    homes = documents.homes[:, None]
    return (homes == ids) | (homes == 255)


class Compiled:
    """The functions of a step, compiled or (on a CPU, for trying out) as they are."""

    def __init__(self, shape: Shape, *, compile_functions: bool) -> None:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compile_functions else function

        if compile_functions:
            torch._dynamo.config.cache_size_limit = 64
        self.project = wrap(lambda *args: project(shape, *args))
        self.finish = wrap(lambda *args: finish(shape, *args))
        self.token_losses = wrap(lambda *args: token_losses(shape, *args))
        self.attend_segments = wrap(attend_segments if compile_functions else dense_segments)
        self.attend_blocks = wrap(attend_blocks if compile_functions else dense_blocks)
        self.attend_all = wrap(attend_all if compile_functions else dense_all)
        self.select_blocks = wrap(lambda q, k: select_blocks(shape, q, k))
