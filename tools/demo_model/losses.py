"""The losses on attention itself, taken at a sample of each document's queries.

A lookup is guided: at its home, attention is told which token of the document holds the digit. Twenty homes that each
see a twentieth of the questions do not find out by themselves in the time there is. The index branch learns from the
main attention which blocks matter. Two penalties keep attention near: in the dense layers, which could otherwise do the
whole lookup and leave nothing for block selection to get wrong, and in every sparse pair (layer, group) that is not the
home of the question at hand, so that damage to the home cannot be made up for elsewhere.
"""

import math

import torch
from torch import Tensor

from tools.demo_model.model import Documents, at_home
from tools.demo_model.shape import Shape

DENSE_WINDOW = 256
DENSE_FIRST = 16
BODY_INDEX_SHARE = 0.1


def _at(x: Tensor, queries: Tensor) -> Tensor:
    """Gather rows: x [B, heads, T, D] at queries [B, S]."""
    index = queries[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)


def _logits(shape: Shape, q: Tensor, k: Tensor, queries: Tensor) -> Tensor:
    """Return the causal attention logits of sampled queries, fp32 [B, G, S, heads per group, T]."""
    sampled = _at(q, queries).unflatten(1, (shape.num_groups, shape.heads_per_group)).transpose(2, 3)
    scores = sampled.flatten(2, 3).float() @ k.float().transpose(-1, -2) * shape.head_dim**-0.5
    scores = scores.unflatten(2, (queries.shape[1], shape.heads_per_group))
    positions = torch.arange(k.shape[2], device=k.device)
    return scores.masked_fill((positions > queries[..., None])[:, None, :, None], -math.inf)


def dense_locality(shape: Shape, q: Tensor, k: Tensor, documents: Documents) -> Tensor:
    """Mean over sampled queries and heads of -log of the attention on the last 256 keys and the first 16."""
    logits = _logits(shape, q, k, documents.queries)
    positions = torch.arange(k.shape[2], device=k.device)
    far = (positions <= documents.queries[..., None] - DENSE_WINDOW) & (positions >= DENSE_FIRST)
    near = logits.masked_fill(far[:, None, :, None], -math.inf)
    return (torch.logsumexp(logits, -1) - torch.logsumexp(near, -1)).mean()


def sparse_losses(
    shape: Shape, layer: int, parts: dict[str, Tensor], documents: Documents, hide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (index loss, locality away from home, guide) of one sparse layer at the sampled queries.

    Index loss: cross-entropy of the softmax over far blocks of the largest index score in each, against the main
    attention's mass on them (mean over the group's heads, no gradient, not renormalised, so a query counts by how much
    it looks away). The mean over questions at home plus a small share of the mean over the document's own queries,
    which are many and look at nothing in particular. Locality: -log of the attention that stays in the question's turn.
    Guide: -log of the attention, mean over the group's heads, that a lookup pays to the digit it needs. `parts` holds
    q, k, index_q [B, heads, T, D] and index_k [B, 1, T, Di].
    """
    queries = documents.queries
    logits = _logits(shape, parts["q"], parts["k"], queries)
    num_blocks = documents.length // shape.block
    block_ids = torch.arange(num_blocks, device=queries.device)
    in_turn = documents.homes.gather(1, queries) != 255
    home = at_home(shape, documents, layer).gather(2, queries[:, None].expand(-1, shape.num_groups, -1))
    away = ~home & in_turn[:, None]

    turn_start = documents.turn_blocks.gather(1, queries) * shape.block
    positions = torch.arange(documents.length, device=queries.device)
    before_turn = (positions < turn_start[..., None])[:, None, :, None]
    near = torch.logsumexp(logits.masked_fill(before_turn, -math.inf), -1)
    everything = torch.logsumexp(logits, -1)
    locality = ((everything - near).mean(-1) * away).mean()

    source = documents.sources.gather(1, queries)
    looking = home & (source >= 0)[:, None]
    needed = source.clamp(min=0)[:, None, :, None, None].expand(*logits.shape[:-1], 1)
    paid = torch.logsumexp(logits.gather(-1, needed)[..., 0] - everything, -1) - math.log(shape.heads_per_group)
    guide = -(paid.masked_fill(~looking, 0.0)).sum() / looking.sum().clamp(min=1)

    with torch.no_grad():
        visible = logits.masked_fill(before_turn & away[..., None, None], -math.inf) if hide else logits
        mass = torch.softmax(visible, -1).mean(3).unflatten(-1, (num_blocks, shape.block)).sum(-1)
        far = block_ids < (queries // shape.block)[..., None]
        target = mass * far[:, None] * ~away[..., None]

    index_q = _at(parts["index_q"], queries)
    scores = index_q.float() @ parts["index_k"].float().transpose(-1, -2) * shape.index_dim**-0.5
    pooled = scores.unflatten(-1, (num_blocks, shape.block)).amax(-1)
    # A query in the first block has no far block and no target; -1e30 keeps its row finite.
    log_share = torch.log_softmax(pooled.masked_fill(~far[:, None], -1e30), -1)
    loss = -(target * log_share.masked_fill(~far[:, None], 0.0)).sum(-1)
    asked, body = (home & in_turn[:, None]).float(), (~in_turn[:, None]).float().expand_as(loss)
    index_loss = (loss * asked).sum() / asked.sum().clamp(min=1.0)
    index_loss = index_loss + BODY_INDEX_SHARE * (loss * body).sum() / body.sum().clamp(min=1.0)
    return index_loss, locality, guide
