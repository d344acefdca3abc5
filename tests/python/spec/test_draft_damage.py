"""`draft-kv` damage: what it moves, that it is no no-op, and that it leaves everything but the drafts alone."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem import LLM, SamplingParams
from tandem.core import layout as core_layout
from tandem.msa import AttentionBackend, CpuBackend, LayerGeometry, Limits, ReferenceBackend, SeatState
from tandem.spec.damage import InvalidDamageError, MisreadDraftBackend, misread_drafts, misread_rows
from tests.python.engine.checkpoint import make_checkpoint, make_drafter

PAGE, HEADS, DIM, PAGES, GROUP = 16, 4, 32, 4, 2
TARGET, DRAFT = 0, 1
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Tokens:
    """One sequence's tokens, as a step sees them."""

    token_seat: Tensor
    write_index: Tensor
    kv_len: Tensor


@dataclass(frozen=True)
class World:
    """A backend whose seat 1 holds `num_entries` entries in both layers, the draft layer's from index 1 on."""

    backend: AttentionBackend
    keys: Tensor
    values: Tensor
    num_entries: int

    def last_token(self) -> Tokens:
        """A token that sees every entry and writes none."""
        return Tokens(int32([1]), int32([-1]), int32([self.num_entries]))

    def attend(self, backend: AttentionBackend, layer: int, q: Tensor) -> Tensor:
        return backend.attend(layer, q, None, self.last_token())


def int32(values: list[int] | range) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def make_world(rng: torch.Generator, num_entries: int, kind: type[AttentionBackend] = ReferenceBackend) -> World:
    tiles = [
        core_layout.TileSpec(layer, role, core_layout.ElementType.FP32, HEADS, DIM)
        for layer in (TARGET, DRAFT)
        for role in (core_layout.Role.K, core_layout.Role.V)
    ]
    layout = core_layout.CacheLayout(tiles, PAGE)
    limits = Limits(
        max_seats=2,
        max_tokens=PAGES * PAGE,
        max_rows=2,
        max_model_len=PAGES * PAGE,
        tokens_per_page=PAGE,
        max_pages=PAGES,
        max_draft_len=1,
        num_slots=PAGES,
    )
    state = SeatState(limits)
    state.block_table[1] = torch.randperm(PAGES, generator=rng).to(torch.int32)
    # Memory that nobody wrote is NaN, so that reading any of it shows.
    pool = torch.full((PAGES * layout.slot_bytes // 4,), torch.nan).view(torch.uint8)
    geometry = [
        LayerGeometry(TARGET, GROUP * HEADS, SCALE),
        LayerGeometry(DRAFT, GROUP * HEADS, SCALE, first_index_attended=1),
    ]
    backend = kind(layout, pool, limits, state, geometry)
    keys, values = torch.randn((2, num_entries, HEADS, DIM), generator=rng)
    everything = Tokens(int32([1] * num_entries), int32(range(num_entries)), int32(range(1, num_entries + 1)))
    backend.write(TARGET, keys, values, None, everything)
    drafts = Tokens(everything.token_seat[1:], everything.write_index[1:], everything.kv_len[1:])
    backend.write(DRAFT, keys[1:], values[1:], None, drafts)
    return World(backend, keys, values, num_entries)


def as_misread(entries: Tensor) -> Tensor:
    """Entries [N, heads, dim] after their pages were stored in groups of 4 tokens, heads inside, and read head first.

    One element at a time; what lies beyond the entries is zero, as is index 0.
    """
    found = torch.zeros((PAGES * PAGE, HEADS, DIM))
    for page in range(-(-len(entries) // PAGE)):
        stored = []
        for first in range(0, PAGE, PAGE // 4):
            for head in range(HEADS):
                for token in range(first, first + PAGE // 4):
                    index = page * PAGE + token
                    live = 0 < index < len(entries)
                    stored.append(entries[index, head] if live else torch.zeros(DIM))
        for place, entry in enumerate(stored):
            found[page * PAGE + place % PAGE, place // PAGE] = entry
    return found[: len(entries)]


def attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of queries [1, heads, dim] over entries 1 and later."""
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = keys[1:, head // GROUP] @ q[0, head] * SCALE
        out[0, head] = scores.softmax(0) @ values[1:, head // GROUP]
    return out


def query(rng: torch.Generator) -> Tensor:
    return 3 * torch.randn((1, GROUP * HEADS, DIM), generator=rng)


@pytest.mark.parametrize("kind", [ReferenceBackend, CpuBackend])
@pytest.mark.parametrize("num_entries", [2, 9, 16, 17, 40, 48])
def test_the_draft_layer_is_read_as_the_wrong_order_of_axes_leaves_it(
    kind: type[AttentionBackend], num_entries: int, torch_rng: torch.Generator
) -> None:
    world = make_world(torch_rng, num_entries, kind)
    q = query(torch_rng)
    expected = attention(q, as_misread(world.keys), as_misread(world.values))
    damaged = world.attend(misread_drafts(world.backend), DRAFT, q)
    torch.testing.assert_close(damaged, expected, rtol=1e-4, atol=1e-5)
    assert float((damaged - world.attend(world.backend, DRAFT, q)).abs().max()) > 0.1


def test_the_permutation_is_that_of_a_page_of_the_model() -> None:
    rows = misread_rows(4, 128)
    assert sorted(rows.tolist()) == list(range(512))
    for place in (0, 1, 31, 32, 127, 128, 300, 511):
        head, token = divmod(place, 128)
        assert int(rows[place]) == (token // 32) * 128 + 32 * head + token % 32


def test_keys_and_values_moved_together_within_a_head_would_change_nothing(torch_rng: torch.Generator) -> None:
    """The kind of damage that a gate cannot see, and why `draft-kv` moves entries between heads."""
    world = make_world(torch_rng, 3 * PAGE)
    # Index 0 holds nothing and stays.
    order = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(PAGE - 1, generator=torch_rng)))
    within_heads = (torch.arange(HEADS)[:, None] * PAGE + order).flatten()
    q = query(torch_rng)
    whole = world.attend(world.backend, DRAFT, q)
    moved = world.attend(MisreadDraftBackend(world.backend, DRAFT, within_heads), DRAFT, q)
    torch.testing.assert_close(moved, whole, rtol=1e-5, atol=1e-6)
    misread = world.attend(MisreadDraftBackend(world.backend, DRAFT, misread_rows(HEADS, PAGE)), DRAFT, q)
    assert float((misread - whole).abs().max()) > 0.1


def test_the_target_and_the_cache_stay_as_they_are(torch_rng: torch.Generator) -> None:
    world = make_world(torch_rng, 40)
    pool = world.backend.pool.clone()
    q = query(torch_rng)
    damaged = misread_drafts(world.backend)
    world.attend(damaged, DRAFT, q)
    assert torch.equal(world.attend(damaged, TARGET, q), world.attend(world.backend, TARGET, q))
    assert torch.equal(world.backend.pool, pool)


@pytest.mark.parametrize(
    ("heads", "page", "first", "message"),
    [(2, 16, 0, "there is no drafter"), (1, 16, 1, "1 KV head"), (2, 6, 1, "do not divide 6 tokens per page")],
)
def test_damage_that_would_change_nothing_is_refused(heads: int, page: int, first: int, message: str) -> None:
    roles = (core_layout.Role.K, core_layout.Role.V)
    layout = core_layout.CacheLayout(
        [core_layout.TileSpec(0, role, core_layout.ElementType.FP32, heads, DIM) for role in roles], page
    )
    limits = Limits(
        max_seats=1,
        max_tokens=1,
        max_rows=1,
        max_model_len=page,
        tokens_per_page=page,
        max_pages=1,
        max_draft_len=0,
        num_slots=1,
    )
    pool = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    geometry = [LayerGeometry(0, heads, SCALE, first_index_attended=first)]
    backend = ReferenceBackend(layout, pool, limits, SeatState(limits), geometry)
    with pytest.raises(InvalidDamageError, match=message):
        misread_drafts(backend)


def test_a_damaged_drafter_proposes_other_tokens_and_the_text_is_the_same(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    make_drafter(folder / "eagle3", seed=1)
    prompts = [f"{place} " * 9 for place in range(8)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts, rounds = [], []
    for wrap in (None, misread_drafts):
        with LLM(folder, num_threads=1, draft_len=1, wrap_attention=wrap) as llm:
            outputs = llm.generate(prompts, params, progress=False)
        texts.append([output.token_ids for output in outputs])
        rounds.append([output.rounds for output in outputs])
    assert texts[0] == texts[1]
    assert rounds[0] != rounds[1]
