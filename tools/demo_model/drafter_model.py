"""The drafter in the form that training wants: an EAGLE 3.1 head, unrolled from many places of a text at once.

The slot of position p takes the token at p+1 and a hidden state, and guesses the token at p+2; the equations are in
`tandem.models.eagle3`. A *base* is a slot with the target's own states, as drafting starts from; step j of its unroll
is the slot j further on, which takes the hidden state that step j-1 left. It attends to the entries of all slots up to
its base, and to those of the steps before it and itself, which belong to this base alone.

Shapes: N slots of a step, M bases of all rows together, R rows of length C with S bases each, H hidden, Q query heads,
G groups, D head width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from tools.demo_model.model import MASKED, Weights, rotate
from tools.demo_model.shape import Shape

MATRICES = ("fc", "q", "k", "v", "o", "gate", "up", "down")


class DraftWeights(nn.Module):
    """All parameters of the drafter, fp32; embedding and head are the target's."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        hidden, aux = shape.hidden, len(shape.aux_layers)
        queries, keys = shape.num_heads * shape.head_dim, shape.num_groups * shape.head_dim

        def normal(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=generator) * size[-1] ** -0.5)

        def ones(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size))

        self.fc_norm = ones(aux, hidden)
        self.fc = normal(hidden, aux * hidden)
        self.token_norm, self.hidden_norm = ones(hidden), ones(hidden)
        self.q, self.k, self.v = normal(queries, 2 * hidden), normal(keys, 2 * hidden), normal(keys, 2 * hidden)
        self.o = nn.Parameter(torch.zeros(hidden, queries))
        self.post_norm, self.norm = ones(hidden), ones(hidden)
        self.gate, self.up = normal(shape.dense_width, hidden), normal(shape.dense_width, hidden)
        self.down = nn.Parameter(torch.zeros(hidden, shape.dense_width))

    @torch.no_grad()
    def start_from(self, target: Weights) -> None:
        """Take over the target's last norm, which the shared head is used to."""
        self.norm.copy_(1.0 + target.norm)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with weight w, in fp32, rounded once to the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def join_states(shape: Shape, aux: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Return the hidden input [N, H] of slots whose target states are aux [3, N, H]."""
    normed = [plain_norm(state, norm, shape.eps) for state, norm in zip(aux, w["fc_norm"], strict=True)]
    return F.linear(torch.cat(normed, -1), w["fc"].to(aux.dtype))


def project(
    shape: Shape, names: str, tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, w: dict[str, Tensor]
) -> list[Tensor]:
    """Return the projections `names`, of "qkv", of slots: embedded tokens [N, H] and hidden inputs [N, H].

    q [N, Q, D], k and v [N, G, D]; q and k rotated over the whole head.
    """
    z = torch.cat([plain_norm(tokens, w["token_norm"], shape.eps), plain_norm(hidden, w["hidden_norm"], shape.eps)], -1)
    parts = [F.linear(z, w[name].to(z.dtype)).unflatten(-1, (-1, shape.head_dim)) for name in names]
    return [part if name == "v" else rotate(part, cos, sin) for name, part in zip(names, parts, strict=True)]


def add_own_steps(
    shape: Shape, attended: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Extend an attention over the slots up to the base by the entries of the base's own steps.

    attended [M, Q, D] and lse [M, Q] are its result and the logsumexp of its logits, q [M, Q, D], keys and values
    [M, G, D] for each step. Returns both for all of them together.
    """
    heads = shape.heads_per_group
    grouped = q.unflatten(1, (-1, heads)).float() * shape.head_dim**-0.5
    own = torch.stack([(grouped * key[:, :, None].float()).sum(-1).flatten(1) for key in keys])
    total = torch.logsumexp(torch.cat([lse[None], own]), 0)
    out = attended.float() * torch.exp(lse - total)[..., None]
    for logit, value in zip(own, values, strict=True):
        share = torch.exp(logit - total).unflatten(1, (-1, heads))
        out = out + (share[..., None] * value[:, :, None].float()).flatten(1, 2)
    return out.to(attended.dtype), total


def finish(shape: Shape, hidden: Tensor, attended: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Return y [M, H] of slots with hidden inputs [M, H] and attention [M, Q, D]."""
    x = hidden + F.linear(attended.flatten(1), w["o"].to(hidden.dtype))
    m = plain_norm(x, w["post_norm"], shape.eps)
    inner = F.silu(F.linear(m, w["gate"].to(m.dtype))) * F.linear(m, w["up"].to(m.dtype))
    x = x + F.linear(inner, w["down"].to(m.dtype))
    return plain_norm(x, w["norm"], shape.eps)


def token_losses(y: Tensor, labels: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy [M] fp32 of labels [M] and whether each is the likeliest token, bool [M]."""
    logits = F.linear(y.float(), head)
    label = logits.gather(-1, labels[:, None])[:, 0]
    return torch.logsumexp(logits, -1) - label, label >= logits.amax(-1)


def attend_window(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from q [R, Q, S, D] to slots [first, last] (int32 [R, S]) of its row; also the logsumexp [R, Q, S]."""

    def in_window(score: Tensor, b: Tensor, h: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        return torch.where((k_at >= first[b, q_at]) & (k_at <= last[b, q_at]), score, MASKED)

    out, aux = flex_attention(q, k, v, score_mod=in_window, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def dense_window(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Do `attend_window` without a kernel of its own."""
    heads = q.shape[1] // k.shape[1]
    slots = torch.arange(k.shape[2], device=k.device)
    seen = (slots >= first[..., None]) & (slots <= last[..., None])
    grouped = q.unflatten(1, (-1, heads)).float() * q.shape[-1] ** -0.5
    logits = (grouped @ k[:, :, None].float().mT).masked_fill(~seen[:, None, None], MASKED)
    lse = torch.logsumexp(logits, -1)
    out = torch.exp(logits - lse[..., None]) @ v[:, :, None].float()
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


class DraftFunctions:
    """The functions of the drafter, compiled or as they are; `kernels` says whether attention has its own."""

    def __init__(self, shape: Shape, *, compile_functions: bool, kernels: bool) -> None:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False) if compile_functions else function

        self.join_states = wrap(lambda *args: join_states(shape, *args))
        self.project_entries = wrap(lambda *args: project(shape, "kv", *args))
        self.project_steps = wrap(lambda *args: project(shape, "qkv", *args))
        self.add_own_steps = wrap(lambda *args: add_own_steps(shape, *args))
        self.finish = wrap(lambda *args: finish(shape, *args))
        self.token_losses = wrap(token_losses)
        self.attend_window = torch.compile(attend_window, dynamic=False) if kernels else dense_window


class Entries(NamedTuple):
    """What the slots of a step hold: hidden inputs [N, H], keys and values [N, G, D]."""

    hidden: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Bases:
    """The bases of rows of one length C: slots `at` [R, S] in their rows, and `first` [R, S], what they see from on."""

    length: int
    at: Tensor
    first: Tensor


class DraftStep(NamedTuple):
    """One step of the unroll of all bases: y [M, H], queries [M, Q, D] and logsumexp of their logits [M, Q]."""

    y: Tensor
    q: Tensor
    lse: Tensor


class Drafter:
    """Runs the drafter of a target on the target's states."""

    def __init__(self, weights: DraftWeights, target: Weights, functions: DraftFunctions, dtype: torch.dtype) -> None:
        self.weights, self.functions, self.dtype = weights, functions, dtype
        self.shape = weights.shape
        self._named = dict(weights.named_parameters())
        self._embed, self.head = target.embed.detach().to(dtype), target.head.detach()
        pairs = self.shape.head_dim // 2
        exponents = torch.arange(pairs, dtype=torch.float64) / pairs
        self._frequencies = (self.shape.rope_theta**-exponents).float().to(self._embed.device)

    def entries(self, aux: Tensor, next_ids: Tensor, positions: Tensor) -> Entries:
        """Return what slots hold that the target has run: aux [3, N, H], next tokens and positions [N]."""
        hidden = self.functions.join_states(aux, self._named)
        k, v = self.functions.project_entries(self._tokens(next_ids), hidden, *self._rope(positions), self._named)
        return Entries(hidden, k, v)

    def unroll(self, entries: Entries, rows: Sequence[Bases], token_ids: Tensor) -> Iterator[DraftStep]:
        """Yield the steps from all bases of rows, laid end to end in `entries`; step j takes token_ids[j] [M]."""
        functions = self.functions
        starts = flat_starts(rows)
        index = torch.cat([start + row_slots(part) for start, part in zip(starts, rows, strict=True)])
        at = torch.cat([part.at.flatten() for part in rows])
        hidden = entries.hidden.index_select(0, index)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step, ids in enumerate(token_ids):
            q, k, v = functions.project_steps(self._tokens(ids), hidden, *self._rope(at + step), self._named)
            attended, lse = self._attend(q, entries, rows, starts)
            # The entry of step 0 is the base's own, which is among those up to the base.
            if step > 0:
                keys.append(k)
                values.append(v)
                attended, lse = functions.add_own_steps(attended, lse, q, keys, values)
            hidden = functions.finish(hidden, attended, self._named)
            yield DraftStep(hidden, q, lse)

    def _attend(
        self, q: Tensor, entries: Entries, rows: Sequence[Bases], starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Attend from q [M, Q, D] to each base's window; returns [M, Q, D] and the logsumexp [M, Q]."""
        sizes = [part.at.numel() for part in rows]
        outs, lses = [], []
        for part, start, mine in zip(rows, starts, q.split(sizes), strict=True):
            end = start + part.at.shape[0] * part.length
            k, v = (_by_row(entry[start:end], part.length) for entry in (entries.k, entries.v))
            query = _by_row(mine, part.at.shape[1])
            out, lse = self.functions.attend_window(query, k, v, part.first.int(), part.at.int())
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs), torch.cat(lses)

    def _tokens(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._embed)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self._frequencies
        return angles.cos(), angles.sin()


def flat_starts(rows: Sequence[Bases]) -> list[int]:
    """Return where the slots of each part start when all follow each other."""
    starts = [0]
    for part in rows:
        starts.append(starts[-1] + part.at.shape[0] * part.length)
    return starts[:-1]


def row_slots(part: Bases) -> Tensor:
    """Return the bases of rows as places among the rows' slots laid end to end, [R * S]."""
    offsets = torch.arange(part.at.shape[0], device=part.at.device) * part.length
    return (part.at + offsets[:, None]).flatten()


def _by_row(part: Tensor, length: int) -> Tensor:
    """View [N, heads, D] as [rows, heads, length, D]."""
    return part.unflatten(0, (-1, length)).transpose(1, 2)
