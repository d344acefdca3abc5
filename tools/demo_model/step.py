"""One training step: batches to the device, forward over both sorts of rows, all losses, backward."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tandem.eval.retrieval_data import NUM_CATEGORIES
from tools.demo_model.chat import LOOKUP, REPLY, WEIGHTS
from tools.demo_model.data import BatchSize, DocumentBatch, ProblemRows
from tools.demo_model.losses import dense_locality, sparse_losses
from tools.demo_model.model import Compiled, Documents, Weights, at_home, causal_mask, near_blocks

DOCUMENT_SHARE = 0.5
Z_SHARE = 1e-4
GUIDE_SHARE = 0.2


@dataclass(frozen=True)
class Phase:
    """What is on at a step: block selection in the sparse layers, and hiding far blocks away from a question's home."""

    selection: bool
    hide: bool


@dataclass(frozen=True)
class StepResult:
    """Losses of a step on the device, each a scalar, by name; and tokens per expert [sparse layers, E]."""

    losses: dict[str, Tensor]
    expert_counts: Tensor
    lookup_hits: Tensor
    lookup_totals: Tensor


class Stepper:
    """Runs forward and backward of one step."""

    def __init__(
        self, weights: Weights, functions: Compiled, size: BatchSize, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.weights, self.functions, self.size, self.device, self.dtype = weights, functions, size, device, dtype
        self._masks: dict[int, BlockMask] = {}
        self._rope: dict[int, tuple[Tensor, Tensor]] = {}
        self._kind_weights = torch.tensor(WEIGHTS, device=device)

    def mask(self, length: int) -> BlockMask:
        """Return the causal block mask of rows of this length."""
        if length not in self._masks:
            self._masks[length] = causal_mask(length, min(128, length), self.device)
        return self._masks[length]

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, rotary_dim / 2] fp32 of a step with documents of this length."""
        if length not in self._rope:
            rows = torch.arange(self.size.row_length).repeat(self.size.problem_rows)
            documents = torch.arange(length).repeat(self.size.document_tokens // length)
            self._rope[length] = rope_tables(self.weights, torch.cat([rows, documents]).to(self.device))
        return self._rope[length]

    def run(self, problems: ProblemRows, batch: DocumentBatch, phase: Phase) -> StepResult:
        """Compute all losses of one step and their gradients."""
        shape, functions = self.weights.shape, self.functions
        length = batch.tokens.shape[1]
        split = self.size.problem_rows * self.size.row_length
        tokens = torch.cat([self._device(problems.tokens).flatten(), self._device(batch.tokens).flatten()]).long()
        kinds = torch.cat([_shifted(self._device(problems.kinds)), _shifted(self._device(batch.kinds))])
        targets = torch.roll(tokens, -1)
        segments = self._device(problems.segments)
        documents = Documents(
            length,
            self._device(batch.homes),
            self._device(batch.turn_blocks),
            self._device(batch.sources).long(),
            self._device(batch.queries).long(),
        )
        cos, sin = self.rope(length)
        near = near_blocks(shape, documents)
        stacked = self.weights.stacked()
        x = F.embedding(tokens, self.weights.embed.to(self.dtype))
        index_loss, dense_near, sparse_near, guide = (torch.zeros((), device=self.device) for _ in range(4))
        counts = []
        for layer in range(shape.num_layers):
            w = self.weights.layer(stacked, layer)
            parts = functions.project(x, w, cos, sin)
            rows = {name: _rows(part[:split], self.size.row_length) for name, part in parts.items()}
            docs = {name: _rows(part[split:], length) for name, part in parts.items()}
            first = functions.attend_segments(
                rows["q"], rows["k"], rows["v"], segments, self.mask(self.size.row_length)
            )
            if not shape.is_sparse(layer):
                dense_near = dense_near + dense_locality(shape, docs["q"], docs["k"], documents)
                second = functions.attend_all(docs["q"], docs["k"], docs["v"], self.mask(length))
            else:
                index, locality, guided = sparse_losses(shape, layer, docs, documents, phase.hide)
                index_loss, sparse_near, guide = index_loss + index, sparse_near + locality, guide + guided
                visible = self._visible(layer, docs, documents, near, phase)
                second = functions.attend_blocks(docs["q"], docs["k"], docs["v"], visible, self.mask(length))
            attended = torch.cat([_flat(first), _flat(second)])
            x, used = functions.finish(x, attended, w)
            if used is not None:
                counts.append(used)
        ce, lse = functions.token_losses(x, targets, self.weights.norm, self.weights.head)
        weight = self._kind_weights[kinds.long()]
        in_problems = torch.arange(len(tokens), device=self.device) < split
        problem_loss = _weighted_mean(ce, weight * in_problems)
        document_loss = _weighted_mean(ce, weight * ~in_problems)
        z_loss = _weighted_mean(lse.square(), (weight > 0).float())
        total = problem_loss + DOCUMENT_SHARE * document_loss + Z_SHARE * z_loss
        total = total + index_loss + dense_near + sparse_near + GUIDE_SHARE * guide
        total.backward()
        with torch.no_grad():
            lookups = kinds[split:] == LOOKUP
            category = documents.homes.flatten().long().clamp(max=NUM_CATEGORIES)
            hits = torch.zeros(NUM_CATEGORIES + 1, device=self.device)
            totals = hits.clone()
            # A digit with more than half of the probability counts as found.
            hits.index_add_(0, category, ((ce[split:] < 0.693) & lookups).float())
            totals.index_add_(0, category, lookups.float())
            losses = {
                "problems": problem_loss,
                "replies": _weighted_mean(ce, ((kinds == REPLY) & in_problems).float()),
                "documents": document_loss,
                "lookup": _weighted_mean(ce[split:], lookups.float()),
                "index": index_loss,
                "dense_near": dense_near,
                "sparse_near": sparse_near,
                "guide": guide,
                "lse": lse.abs().mean(),
            }
        return StepResult(
            {name: value.detach() for name, value in losses.items()},
            torch.stack(counts).detach(),
            hits[:NUM_CATEGORIES],
            totals[:NUM_CATEGORIES],
        )

    def _visible(self, layer: int, docs: dict[str, Tensor], documents: Documents, near: Tensor, phase: Phase) -> Tensor:
        """Return the blocks a query may attend to in a sparse layer, bool [B, G, T, n]."""
        shape = self.weights.shape
        home = at_home(shape, documents, layer)[..., None]
        visible = home | near[:, None] if phase.hide else torch.ones_like(home) | torch.zeros_like(near[:, None])
        if phase.selection:
            chosen: Tensor = self.functions.select_blocks(docs["index_q"].detach(), docs["index_k"][:, 0].detach())
            visible = visible & chosen
        return visible

    def _device(self, array: object) -> Tensor:
        tensor = torch.as_tensor(array)
        if tensor.dtype == torch.uint16:
            tensor = tensor.to(torch.int32)
        return tensor.to(self.device, non_blocking=True)


def rope_tables(weights: Weights, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [N, rotary_dim / 2] fp32 at positions [N]."""
    shape = weights.shape
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim
    frequencies = (shape.rope_theta**-exponents).float().to(positions.device)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rows(part: Tensor, length: int) -> Tensor:
    """View [N, heads, D] as [rows, heads, length, D]."""
    return part.unflatten(0, (-1, length)).transpose(1, 2)


def _flat(attended: Tensor) -> Tensor:
    """Turn [rows, heads, length, D] into [N, heads * D]."""
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def _shifted(kinds: Tensor) -> Tensor:
    """Return the kind of each position's target, flat: the next token's, none at a row's end."""
    return F.pad(kinds[:, 1:], (0, 1)).flatten()


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)
