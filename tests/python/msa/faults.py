"""Selections that are wrong on purpose, and the margin by which a right one was decided."""

import torch
from torch import Tensor

from tandem.msa import ReferenceBackend, SparseGeometry
from tandem.msa.reference import block_max, choose_blocks


class OneBlockTooFew(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        fewer = super().choose(scores, kv_len, SparseGeometry(sparse.block_size, sparse.topk - 1, sparse.num_local))
        return torch.nn.functional.pad(fewer, (0, 1), value=-1)


class OneSetForAllGroups(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        return super().choose(scores.amax(dim=1, keepdim=True).expand_as(scores), kv_len, sparse)


class GroupsRotated(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        return super().choose(scores.roll(1, dims=1), kv_len, sparse)


class MeanInsteadOfMax(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        size = sparse.block_size
        visible = (scores > -torch.inf).float()
        padding = (0, -scores.shape[-1] % size)
        total = torch.nn.functional.pad(scores.clamp(min=-1e9) * visible, padding).unflatten(-1, (-1, size)).sum(-1)
        count = torch.nn.functional.pad(visible, padding).unflatten(-1, (-1, size)).sum(-1)
        mean = torch.where(count > 0, total / count, -torch.inf)
        return choose_blocks(mean, (kv_len + size - 1) // size, sparse.topk, sparse.num_local)


class LocalBlockNotForced(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        return super().choose(scores, kv_len, SparseGeometry(sparse.block_size, sparse.topk, 0))


class FirstBlockForced(ReferenceBackend):
    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        forced = scores.clone()
        forced[..., 0] = torch.inf
        return super().choose(forced, kv_len, sparse)


class _KeysLate(ReferenceBackend):
    tokens: int

    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        late = torch.nn.functional.pad(scores, (self.tokens, 0), value=-1e9)[..., : scores.shape[-1]]
        return super().choose(late.masked_fill(scores == -torch.inf, -torch.inf), kv_len, sparse)


def keys_late_by(tokens: int) -> type[ReferenceBackend]:
    """Index keys read from `tokens` places before their own."""
    return type(f"KeysLateBy{tokens}", (_KeysLate,), {"tokens": tokens})


class WholeRowVisible(ReferenceBackend):
    """Every token of a step counts blocks as its last token does."""

    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        return super().choose(scores, kv_len.max().expand_as(kv_len), sparse)


def faults(block_size: int) -> list[type[ReferenceBackend]]:
    return [
        OneBlockTooFew,
        OneSetForAllGroups,
        GroupsRotated,
        MeanInsteadOfMax,
        LocalBlockNotForced,
        FirstBlockForced,
        keys_late_by(block_size),
        keys_late_by(1),
        WholeRowVisible,
    ]


class Margins(ReferenceBackend):
    """Gives no blocks but, per token and head, how much the last choice scored above the best block left out.

    Infinite where nothing is left out.
    """

    def __init__(self, of: ReferenceBackend) -> None:
        super().__init__(of.layout, of.pool, of.limits, of.state, [cached.geometry for cached in of.layers.values()])
        self._parts: list[Tensor] = []

    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        best = block_max(scores, sparse.block_size)
        newest = (kv_len - 1) // sparse.block_size
        age = newest[:, None, None] - torch.arange(best.shape[-1])
        best = best.masked_fill((age >= 0) & (age < sparse.num_local), torch.inf).sort(dim=-1, descending=True).values
        margin = torch.full(best.shape[:2], torch.inf)
        if best.shape[-1] > sparse.topk:
            left_out = best[..., sparse.topk]
            margin = torch.where(left_out > -torch.inf, best[..., sparse.topk - 1] - left_out, margin)
        self._parts.append(margin)
        return super().choose(scores, kv_len, sparse)

    def of_step(self, layer: int, index_q: Tensor, tokens: object) -> Tensor:
        """[T, index heads] for a step whose tokens all belong to one sequence."""
        self._parts.clear()
        self.select(layer, index_q, tokens)  # type: ignore[arg-type]
        return torch.cat(self._parts)


def differing_sets(ours: Tensor, theirs: Tensor, margins: Tensor, near_tie: float) -> tuple[int, int]:
    """How many sets [T, Hi, topk] differ among those decided by more than `near_tie`, and how many those are."""
    decided = margins > near_tie
    differs = (ours != theirs).any(dim=-1)
    return int((differs & decided).sum()), int(decided.sum())
