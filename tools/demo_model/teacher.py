"""The trained target as a teacher: the states that a drafter is fed, and what the target itself would say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tools.demo_model.model import Compiled, Weights, causal_mask, gemma_norm
from tools.demo_model.step import rope_tables


@dataclass(frozen=True)
class Rows:
    """Rows of one length: `tokens` [R, C] int64, and `segments` [R, C], the conversation that a token is of.

    Without segments each row is one text, with block selection; with them no text may be longer than what is selected.
    """

    tokens: Tensor
    segments: Tensor | None = None


class Teacher:
    """Runs the target on whole texts."""

    def __init__(self, weights: Weights, functions: Compiled, dtype: torch.dtype) -> None:
        self.weights, self.functions, self.dtype = weights, functions, dtype
        self._stacked = weights.stacked()
        self._masks: dict[int, BlockMask] = {}

    @torch.no_grad()
    def states(self, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Return the aux states [3, N, H] of all tokens of `parts`, laid end to end, and the argmax [N] after each."""
        shape, functions = self.weights.shape, self.functions
        tokens = torch.cat([part.tokens.flatten() for part in parts])
        sizes = [part.tokens.numel() for part in parts]
        cos, sin = rope_tables(self.weights, positions_of(parts))
        x = F.embedding(tokens, self.weights.embed.to(self.dtype))
        aux = []
        for layer in range(shape.num_layers):
            if layer in shape.aux_layers:
                aux.append(x)
            w = self.weights.layer(self._stacked, layer)
            projected = functions.project(x, w, cos, sin)
            split = {name: part.split(sizes) for name, part in projected.items()}
            attended = [
                self._attend(layer, part, {name: pieces[number] for name, pieces in split.items()})
                for number, part in enumerate(parts)
            ]
            x, _ = functions.finish(x, torch.cat(attended), w)
        logits = F.linear(gemma_norm(x, self.weights.norm, shape.eps).float(), self.weights.head)
        return torch.stack(aux), logits.argmax(-1)

    def _attend(self, layer: int, part: Rows, projected: dict[str, Tensor]) -> Tensor:
        """Attend within the rows of one part; returns [R * C, Q * D]."""
        length = part.tokens.shape[1]
        rows = {name: value.unflatten(0, (-1, length)).transpose(1, 2) for name, value in projected.items()}
        q, k, v = rows["q"], rows["k"], rows["v"]
        if part.segments is not None:
            out = self.functions.attend_segments(q, k, v, part.segments, self._mask(length))
        elif self.weights.shape.is_sparse(layer):
            visible = self.functions.select_blocks(rows["index_q"], rows["index_k"][:, 0])
            out = self.functions.attend_blocks(q, k, v, visible, self._mask(length))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended: Tensor = out.transpose(1, 2).flatten(2).flatten(0, 1)
        return attended

    def _mask(self, length: int) -> BlockMask:
        if length not in self._masks:
            self._masks[length] = causal_mask(length, min(128, length), self.weights.embed.device)
        return self._masks[length]


def positions_of(parts: Sequence[Rows]) -> Tensor:
    """Return the position in its row of each token of parts laid end to end, [N]."""
    device = parts[0].tokens.device
    return torch.cat([torch.arange(p.tokens.shape[1], device=device).repeat(p.tokens.shape[0]) for p in parts])
