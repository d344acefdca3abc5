"""A cached prefix holds exactly the draft entries that a cold run computes, whatever followed it when it was cached."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.msa import StepMetadata
from tandem.spec import worker
from tandem.spec.slots import DraftSlots
from tests.python.models.eagle3_support import CLASSIC, DraftShape, Pair
from tests.python.spec.test_rounds import prompt_of
from tests.python.spec.world import Text, World

PairOf = Callable[[DraftShape], Pair]
PROMPT, NEW = 35, 12
MAX_LENGTH = 64


def cold_run(pair: Pair, prompt: list[int], draft_len: int, chunk: int | None = None, first: int = 1) -> Text:
    world = World(pair.target, pair.drafter, MAX_LENGTH, draft_len, first_index_attended=first)
    return world.generate(prompt, NEW, chunk=chunk)


def hit_run(
    pair: Pair,
    prompt: list[int],
    other: list[int],
    hit: int,
    draft_len: int,
    chunk: int | None = None,
    first: int = 1,
) -> Text:
    """The request after a hit of `hit` tokens on the entries of a sequence that goes on as `other` does."""
    world = World(pair.target, pair.drafter, MAX_LENGTH, draft_len, first_index_attended=first)
    world.prefill(1, [*prompt[:hit], *other[hit:]])
    world.copy_prefix(1, 0, hit)
    return world.generate(prompt, NEW, chunk=chunk, hit=hit)


def prompts(py_rng: random.Random) -> tuple[list[int], list[int]]:
    prompt = prompt_of(py_rng, PROMPT)
    return prompt, [(token + 1 + py_rng.randrange(62)) % 64 for token in prompt] + [5] * 4


@pytest.mark.parametrize(("shape", "chunk"), [(DraftShape(), None), (CLASSIC, 6)], ids=["3.1", "classic, chunks"])
def test_drafts_are_the_same_with_a_hit_of_any_length(
    shape: DraftShape, chunk: int | None, pair_of: PairOf, py_rng: random.Random
) -> None:
    pair = pair_of(shape)
    prompt, other = prompts(py_rng)
    cold = cold_run(pair, prompt, 3)
    for hit in range(PROMPT + 1):
        assert hit_run(pair, prompt, other, hit, 3, chunk) == cold, f"hit of {hit} tokens"


@pytest.mark.parametrize("draft_len", range(1, 8))
def test_drafts_are_the_same_with_a_hit_at_every_draft_length(
    draft_len: int, pair_of: PairOf, py_rng: random.Random
) -> None:
    pair = pair_of(DraftShape())
    prompt, other = prompts(py_rng)
    cold = cold_run(pair, prompt, draft_len)
    for hit, chunk in ((0, 1), (1, None), (16, 16), (32, 1), (32, None), (PROMPT, 16)):
        assert hit_run(pair, prompt, other, hit, draft_len, chunk) == cold, f"hit of {hit} tokens, chunks of {chunk}"


def test_a_hit_rewrites_no_entry_below_it(pair_of: PairOf, py_rng: random.Random) -> None:
    """Pages below a hit are shared with other sequences."""
    pair = pair_of(DraftShape())
    prompt, other = prompts(py_rng)
    warm = World(pair.target, pair.drafter, MAX_LENGTH, 3)
    warm.prefill(1, [*prompt[:32], *other[32:]])
    warm.state.block_table[0, :2] = warm.state.block_table[1, :2]
    slots = warm.state.block_table[0, :2].long()
    before = warm.pool.view(warm.limits.num_slots, -1)[slots].clone()
    warm.prefill(0, prompt, hit=32)
    assert torch.equal(warm.pool.view(warm.limits.num_slots, -1)[slots], before)


def unshifted_extend(meta: StepMetadata) -> DraftSlots:
    """The fault: the slot of position p stored at index p, as the target's entry is."""
    return DraftSlots(meta.token_seat, meta.position, meta.write_index, meta.kv_len)


def unshifted_single(*arguments: Any) -> DraftSlots:
    slots = shifted_single(*arguments)
    inside = slots.kv_len > 0
    write_index = torch.where(inside, slots.write_index - 1, -1)
    return replace(slots, write_index=write_index, kv_len=(slots.kv_len - 1).clamp(min=0))


shifted_single = worker.single_slots


def test_with_the_shift_undone_a_hit_changes_the_drafts(
    pair_of: PairOf, py_rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: entry h-1 then depends on token h, which the cached sequence had otherwise."""
    monkeypatch.setattr(worker, "extend_slots", unshifted_extend)
    monkeypatch.setattr(worker, "single_slots", unshifted_single)
    pair = pair_of(DraftShape())
    prompt, other = prompts(py_rng)
    cold = cold_run(pair, prompt, 3, first=0)
    changed = 0
    for hit in (0, *range(9, PROMPT, 2)):
        warm = hit_run(pair, prompt, other, hit, 3, first=0)
        assert warm.tokens == cold.tokens
        assert hit > 0 or warm == cold
        changed += warm != cold
    assert changed > 3
