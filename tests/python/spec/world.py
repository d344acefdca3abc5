"""Sequences through a target and its drafter, without an engine: pools, block tables and the calls of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.core import layout
from tandem.models import MiniMaxM3, attention_geometry, eagle3, tile_specs
from tandem.msa import AttentionBackend, CpuBackend, Limits, SeatState, StepMetadata, advance, derive, tile_tensor
from tandem.spec import DraftWorker, Verified, store_drafts, verify
from tests.python.msa.plans import Row, context, decode, plan

Decide = Callable[[StepMetadata, Tensor], Tensor]
"""(the derived step, logits [L, V]) -> the token decided at each position, int32 [L]."""


def greedy(meta: StepMetadata, logits: Tensor) -> Tensor:
    return logits.max(dim=-1).indices.to(torch.int32)


Script = Callable[["Text"], list[int]]
"""A text so far -> the K drafts of its next round."""


@dataclass
class Outcome:
    """One step: the positions' tokens, what verification made of them, the new drafts [N, K], the states captured."""

    sampled: Tensor
    verified: Verified
    drafts: Tensor
    captured: list[Tensor]


@dataclass
class Round:
    """One decode step of one sequence."""

    drafts: list[int]
    num_accepted: int
    num_known: int
    """Tokens in the target's cache when the drafts were proposed."""


@dataclass
class Text:
    """What a sequence produced: prompt and output, and the rounds on the way."""

    tokens: list[int]
    rounds: list[Round] = field(default_factory=list)


class World:
    """One pool with sequences in it, each on its own seat; all cache memory starts as NaN, slots are shuffled.

    Args:
        target, drafter: the models.
        max_length: tokens of one sequence at most.
        draft_len: K.
        seats: sequences at once.
        first_index_attended: of the draft layer; another one than the drafter's is a fault to be noticed.
    """

    def __init__(
        self,
        target: MiniMaxM3,
        drafter: eagle3.Eagle3,
        max_length: int,
        draft_len: int,
        *,
        seats: int = 2,
        backend: type[AttentionBackend] = CpuBackend,
        first_index_attended: int = 1,
        decide: Decide = greedy,
    ) -> None:
        page = target.config.block_size
        pages = -(-max_length // page)
        self.target, self.drafter, self.draft_len, self.page, self.decide = target, drafter, draft_len, page, decide
        self.limits = Limits(
            max_seats=seats,
            max_tokens=max_length + seats * (1 + draft_len) + 8,
            max_rows=seats + 2,
            max_model_len=max_length,
            tokens_per_page=page,
            max_pages=pages,
            max_draft_len=draft_len,
            num_slots=seats * pages + 3,
        )
        tiles = tile_specs(target.config, layout.ElementType.FP32)
        tiles += eagle3.tile_specs(drafter.config, drafter.layer, layout.ElementType.FP32)
        self.cache = layout.CacheLayout(tiles, page)
        self.pool = torch.full((self.limits.num_slots * self.cache.slot_bytes,), 0xFF, dtype=torch.uint8)
        self.state = SeatState(self.limits)
        self.meta = StepMetadata(self.limits)
        draft = eagle3.attention_geometry(drafter.config, drafter.layer)
        draft = type(draft)(draft.layer, draft.num_q_heads, draft.scale, None, first_index_attended)
        geometry = [*attention_geometry(target.config), draft]
        self.backend = backend(self.cache, self.pool, self.limits, self.state, geometry)
        self.worker = DraftWorker(drafter, self.backend, draft_len)
        order = np.random.default_rng(0).permutation(self.limits.num_slots)[: seats * pages].astype(np.int32)
        self.state.block_table[:seats] = torch.from_numpy(order).view(seats, pages)

    def step(self, rows: Sequence[Row], proposing: Sequence[int] | None = None, **padding: int) -> Outcome:
        """Run the calls of one step in an engine's order; these sampling rows propose drafts, all by default."""
        derive(plan(*rows), self.state, self.meta, **padding)
        meta = self.meta
        hidden, captured = self.target.forward(meta.token_ids, meta, self.backend, self.drafter.aux_layers)
        logits = self.target.logits(hidden.index_select(0, meta.logit_token))
        sampled = self.decide(meta, logits)
        verified = verify(meta, sampled, self.state.drafts)
        advance(self.state, meta, verified.newest, verified.num_accepted)
        wanted = None if proposing is None else torch.tensor(proposing, dtype=torch.int64)
        drafts = self.worker.run(meta, sampled, verified, captured, wanted)
        store_drafts(self.state, meta, drafts)
        return Outcome(sampled, verified, drafts, captured)

    def prefill(self, seat: int, prompt: Sequence[int], chunk: int | None = None, hit: int = 0) -> Outcome:
        """Run a prompt in chunks of `chunk` tokens, the first `hit` tokens of which lie in the seat's pages already."""
        start, end = max(hit - 1, 0), len(prompt)
        first = start
        while True:
            stop = min(first + (chunk or end), end)
            last = stop == end
            ids = [*prompt[first:stop], -1 if last else prompt[stop]]
            more = {"write_from": hit, "max_length": self.limits.max_model_len, "samples": last}
            outcome = self.step([context(seat, first, ids, fresh=first == start, **more)])
            if last:
                return outcome
            first = stop

    def decode(
        self, seat: int, tokens: list[int], num_tokens: int, script: Script | None = None, ahead: int = 0
    ) -> Text:
        """Decode until `tokens` (the prompt and its first output) has `num_tokens`, in rounds of K drafts.

        `script` gives each round's drafts in the drafter's place; rows are planned `ahead` tokens too long.
        Whatever lies above the sequence's valid entries is NaN before every step.
        """
        text = Text(list(tokens))
        while len(text.tokens) < num_tokens:
            num_known = int(self.state.length[seat])
            self.poison(seat, num_known)
            if script is not None:
                self.state.drafts[seat] = torch.tensor(script(text), dtype=torch.int32)
            drafts = self.state.drafts[seat].tolist()
            row = decode(seat, num_known + ahead, self.draft_len, max_length=self.limits.max_model_len)
            outcome = self.step([row])
            accepted = int(outcome.verified.num_accepted[0])
            text.tokens += outcome.sampled[: accepted + 1].tolist()
            text.rounds.append(Round(drafts, accepted, num_known))
        return text

    def decode_plainly(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The text of `num_tokens` tokens, prompt included, one token a step and without a drafter's pass."""
        row = context(0, 0, [*prompt, -1], fresh=True, max_length=self.limits.max_model_len)
        tokens = list(prompt)
        while len(tokens) < num_tokens:
            derive(plan(row), self.state, self.meta)
            hidden, _ = self.target.forward(self.meta.token_ids, self.meta, self.backend)
            sampled = self.decide(self.meta, self.target.logits(hidden[-1:]))
            advance(self.state, self.meta, sampled)
            row = decode(0, len(tokens), max_length=self.limits.max_model_len)
            tokens.append(int(sampled[0]))
        return tokens

    def generate(
        self, prompt: Sequence[int], num_new: int, *, seat: int = 0, chunk: int | None = None, hit: int = 0
    ) -> Text:
        """Prefill and decode at least `num_new` tokens."""
        first = int(self.prefill(seat, prompt, chunk, hit).verified.newest[0])
        return self.decode(seat, [*prompt, first], len(prompt) + num_new)

    def copy_prefix(self, source: int, seat: int, hit: int) -> None:
        """Give a sequence the entries [0, hit) of another one in all layers, NaN above; `hit` need not end a page."""
        slots = self.pool.view(self.limits.num_slots, -1)
        table = self.state.block_table.long()
        slots[table[seat]] = slots[table[source]]
        self.poison(seat, hit, hit)

    def poison(self, seat: int, target_first: int, draft_first: int | None = None) -> None:
        """Make NaN of a sequence's entries from an index on; of draft entries by default from the one after it on."""
        for spec in self.cache.tiles:
            view = self.cache.view(spec.layer, spec.role)
            is_draft = spec.layer == self.drafter.layer
            first = target_first if not is_draft else target_first + 1 if draft_first is None else draft_first
            index = torch.arange(first, self.limits.max_pages * self.page)
            slot = self.state.block_table[seat, index // self.page].long()
            tile_tensor(self.pool, view, self.limits.num_slots)[slot, 0, :, index % self.page] = torch.nan

    def draft_entries(self, seat: int, first: int, end: int) -> Tensor:
        """Draft keys and values at token indices [first, end), fp32 [2, end - first, heads, dim]."""
        index = torch.arange(first, end)
        slot = self.state.block_table[seat, index // self.page].long()
        parts = []
        for role in (layout.Role.K, layout.Role.V):
            view = self.cache.view(self.drafter.layer, role)
            parts.append(tile_tensor(self.pool, view, self.limits.num_slots)[slot, 0, :, index % self.page])
        return torch.stack(parts)
