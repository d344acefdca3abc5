from dataclasses import dataclass

import pytest
import torch

from tandem.core import layout as core_layout
from tandem.eval.damage import DamagedIndexBackend, IndexKeyDamage, moved_order
from tandem.msa import LayerGeometry, Limits, ReferenceBackend, SeatState, SparseGeometry
from tandem.spec.damage import InvalidDamageError

PAGE, DIM, GROUPS, PAGES, TOPK = 16, 8, 2, 12, 3
SPARSE_LAYERS = (1, 2)
ROLES = (core_layout.Role.K, core_layout.Role.V)
LENGTH = 8 * PAGE + 5


@dataclass(frozen=True)
class Tokens:
    """One sequence's tokens, as a step sees them."""

    token_seat: torch.Tensor
    write_index: torch.Tensor
    kv_len: torch.Tensor


def int32(values):
    return torch.tensor(list(values), dtype=torch.int32)


@pytest.fixture
def backend(torch_rng):
    """A reference backend with one dense and two sparse layers; seat 1 holds LENGTH written tokens."""
    tiles = [
        core_layout.TileSpec(layer, role, core_layout.ElementType.FP32, GROUPS, DIM)
        for layer in range(3)
        for role in ROLES
    ]
    tiles += [
        core_layout.TileSpec(layer, core_layout.Role.INDEX_K, core_layout.ElementType.FP32, 1, DIM, replicated=True)
        for layer in SPARSE_LAYERS
    ]
    layout = core_layout.CacheLayout(tiles, PAGE)
    limits = Limits(
        max_seats=2,
        max_tokens=LENGTH,
        max_rows=2,
        max_model_len=PAGES * PAGE,
        tokens_per_page=PAGE,
        max_pages=PAGES,
        max_draft_len=0,
        num_slots=PAGES,
    )
    state = SeatState(limits)
    state.block_table[1] = torch.randperm(PAGES, generator=torch_rng).to(torch.int32)
    pool = torch.zeros(PAGES * layout.slot_bytes, dtype=torch.uint8)
    sparse = SparseGeometry(block_size=PAGE, topk=TOPK, num_local=1)
    geometry = [LayerGeometry(layer, 2 * GROUPS, 1.0, sparse if layer in SPARSE_LAYERS else None) for layer in range(3)]
    inner = ReferenceBackend(layout, pool, limits, state, geometry)
    everything = Tokens(int32([1] * LENGTH), int32(range(LENGTH)), int32(range(1, LENGTH + 1)))
    for layer in range(3):
        k, v = torch.randn(2, LENGTH, GROUPS, DIM, generator=torch_rng)
        # Unit keys, so that a key scores highest against itself.
        keys = torch.nn.functional.normalize(torch.randn(LENGTH, DIM, generator=torch_rng), dim=-1)
        index_k = keys if layer in SPARSE_LAYERS else None
        inner.write(layer, k, v, index_k, everything)
    return inner


LAST = Tokens(int32([1]), int32([-1]), int32([LENGTH]))


def query_for_page(backend, layer, page):
    """An index query that finds the key of a token of `page` first, the same for every group."""
    table = backend.state.block_table[1]
    view = backend.layout.view(layer, core_layout.Role.INDEX_K)
    start = view.offset(int(table[page]), 0, 0, 3)
    key = backend.pool[start : start + 4 * DIM].view(torch.float32)
    return key.expand(1, GROUPS, DIM).clone()


@pytest.mark.parametrize("page", range(8))
def test_damaged_selection_scores_each_page_by_another_pages_index_keys(backend, page):
    damaged = DamagedIndexBackend(backend, IndexKeyDamage())
    order = moved_order(8)
    query = query_for_page(backend, 1, page)
    best = order.index(page)
    assert best != page
    right, wrong = backend.select(1, query, LAST), damaged.select(1, query, LAST)
    for group in range(GROUPS):
        assert page in right[0, group].tolist()
        assert best in wrong[0, group].tolist()
        # The same blocks with their ids moved; the newest block is forced and stays.
        moved = sorted(order.index(block) for block in right[0, group].tolist() if block != 8)
        assert wrong[0, group].tolist() == [*moved, 8]


def test_damage_to_one_home_leaves_every_other_selection_alone(backend, torch_rng):
    damaged = DamagedIndexBackend(backend, IndexKeyDamage((2, 1)))
    query = torch.randn(1, GROUPS, DIM, generator=torch_rng)
    assert torch.equal(damaged.select(1, query, LAST), backend.select(1, query, LAST))
    right, wrong = backend.select(2, query, LAST), damaged.select(2, query, LAST)
    assert torch.equal(right[:, 0], wrong[:, 0])
    assert not torch.equal(right[:, 1], wrong[:, 1])


def test_the_cache_and_the_block_table_stay_as_they_were(backend, torch_rng):
    pool, table = backend.pool.clone(), backend.state.block_table.clone()
    damaged = DamagedIndexBackend(backend, IndexKeyDamage())
    query = torch.randn(1, GROUPS, DIM, generator=torch_rng)
    blocks = damaged.select(1, query, LAST)
    q = torch.randn(1, 2 * GROUPS, DIM, generator=torch_rng)
    assert torch.equal(damaged.attend(1, q, blocks, LAST), backend.attend(1, q, blocks, LAST))
    assert torch.equal(backend.pool, pool)
    assert torch.equal(backend.state.block_table, table)


def test_writes_go_to_the_undamaged_cache(backend, torch_rng):
    damaged = DamagedIndexBackend(backend, IndexKeyDamage())
    before = backend.pool.clone()
    k, v = torch.randn(2, 1, GROUPS, DIM, generator=torch_rng)
    damaged.write(0, k, v, None, Tokens(int32([1]), int32([LENGTH]), int32([LENGTH + 1])))
    assert not torch.equal(backend.pool, before)


def test_a_moved_order_leaves_nothing_in_its_place():
    for count in range(2, 70):
        order = moved_order(count)
        assert sorted(order) == list(range(count))
        assert all(order[place] != place for place in range(count))
    assert moved_order(1) == [0]
    assert moved_order(0) == []


@pytest.mark.parametrize(("text", "home"), [("index-keys", None), ("index-keys:5,2", (5, 2))])
def test_damage_is_read_from_its_description(text, home):
    assert IndexKeyDamage.parse(text).home == home


@pytest.mark.parametrize(
    "text", ["", "index", "index-keys:", "index-keys:5", "index-keys:5,x", "index-keys:1,2,3", "draft"]
)
def test_other_descriptions_are_refused(text):
    with pytest.raises(InvalidDamageError, match="index-keys:LAYER,GROUP"):
        IndexKeyDamage.parse(text)


@pytest.mark.parametrize(
    ("home", "word"), [((0, 0), r"sparse layers are \[1, 2\]"), ((1, 2), "has no group 2; it has 2")]
)
def test_a_home_that_the_model_lacks_is_refused_by_name(backend, home, word):
    with pytest.raises(InvalidDamageError, match=word):
        DamagedIndexBackend(backend, IndexKeyDamage(home))
