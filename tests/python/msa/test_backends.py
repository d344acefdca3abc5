"""Every backend against plain arithmetic: blocks, outputs and which bytes of the pool change."""

import itertools

import numpy as np
import pytest
import torch

from tandem.core import InvalidArgument
from tandem.core import layout as core_layout
from tandem.msa import GeometryError, PlanRows

from .plans import context, decode, plan
from .steps import Step, check, run
from .worlds import BACKENDS, DENSE, SPARSE, Shape, World

NAN = float("nan")
BY_BACKEND = pytest.mark.parametrize("name", sorted(BACKENDS))

# Each pair of values once: element type x page x placement x poison x view.
SHAPES = [
    (Shape(page=4), 4),
    (Shape(page=4, element=core_layout.ElementType.BF16, placement="reversed", poison=1e4), 2),
    (Shape(page=4, placement="ordered", poison=1e4, topk=3, num_local=2), 1),
    (Shape(page=16, element=core_layout.ElementType.BF16, placement="fragmented", max_model_len=160), 4),
    (Shape(page=16, placement="reversed", poison=1e4, max_model_len=160, num_q_heads=8, num_kv_heads=4), 16),
    (Shape(page=16, element=core_layout.ElementType.BF16, placement="ordered", max_model_len=160, num_local=0), 8),
    (Shape(page=128, placement="reversed", topk=4, dim=128, max_model_len=1024, num_q_heads=8, num_kv_heads=4), 32),
    (Shape(page=128, element=core_layout.ElementType.BF16, poison=1e4, topk=4, dim=128, max_model_len=1024), 128),
]


def mixed_rows(world: World) -> PlanRows:
    """A verify row over a page edge, a chunk in the middle of a prompt, a plain decode row and a new prompt."""
    shape = world.shape
    limit = shape.max_model_len
    world.remember(0, limit - shape.page - 2)
    world.remember(1, 3 * shape.page - 1)
    world.remember(2, limit // 2)
    ids = [1] * min(shape.page + 2, 20)
    return plan(
        decode(0, limit - shape.page - 2, 3, max_length=limit),
        context(1, 3 * shape.page - 1, ids, max_length=limit),
        decode(2, limit // 2, max_length=limit),
        context(3, 0, ids, max_length=limit, fresh=True),
    )


@BY_BACKEND
@pytest.mark.parametrize(("shape", "view"), SHAPES)
def test_a_mixed_batch_over_poisoned_fragmented_pages_is_right_token_by_token(
    name: str, shape: Shape, view: int, seed: int
) -> None:
    world = World(shape, seed)
    step = Step.random(world, mixed_rows(world), pad_rows=6, pad_tokens=64)
    compared = check(world, step, run(world.backend(name, view), step))
    assert compared > 20


@BY_BACKEND
@pytest.mark.parametrize(("shape", "view"), SHAPES)
def test_a_step_changes_the_bytes_of_its_own_entries_and_no_others(
    name: str, shape: Shape, view: int, seed: int
) -> None:
    world = World(shape, seed)
    step = Step.random(world, mixed_rows(world), pad_rows=6, pad_tokens=64)
    before = world.pool.numpy().copy()
    run(world.backend(name, view), step)
    places = [(int(s), int(i)) for s, i in zip(step.meta.token_seat, step.meta.write_index, strict=True) if i >= 0]
    allowed = world.written_bytes(places, DENSE) | world.written_bytes(places, SPARSE)
    changed = before != world.pool.numpy()
    assert not (changed & ~allowed).any()
    # Random numbers leave a byte as it was now and then, but never most of them.
    assert changed[allowed].mean() > 0.9


@BY_BACKEND
@pytest.mark.parametrize("length", [7, 8, 9])
def test_each_token_of_a_verify_row_equals_feeding_it_alone(name: str, length: int, seed: int) -> None:
    """Draft tokens lie inside the attention bounds of those after them, also across a page edge."""
    world = World(Shape(), seed)
    world.remember(0, length)
    together = Step.random(world, plan(decode(0, length, 3)))
    whole = run(world.backend(name), together)
    check(world, together, whole)
    again = World(Shape(), seed)
    again.remember(0, length)
    for t in range(4):
        again.state.length[0] = length + t
        part = slice(t, t + 1)
        alone = Step(
            again.metadata(plan(decode(0, length + t))),
            {layer: entries[part] for layer, entries in together.new.items()},
            {layer: type(q)(q.q[part], q.index_q[part]) for layer, q in together.queries.items()},
        )
        single = run(again.backend(name), alone)
        assert torch.equal(single.blocks[0], whole.blocks[t])
        for layer in (DENSE, SPARSE):
            torch.testing.assert_close(single.out[layer][0], whole.out[layer][t], rtol=1e-5, atol=1e-5)


@BY_BACKEND
def test_a_verify_row_a_decode_row_and_a_chunk_in_one_step_each_get_what_they_get_alone(name: str, seed: int) -> None:
    rows = [decode(0, 9, 3), decode(1, 14), context(2, 6, [1] * 8)]
    together = World(Shape(), seed)
    for seat, length in ((0, 9), (1, 14), (2, 6)):
        together.remember(seat, length)
    step = Step.random(together, plan(*rows))
    result = run(together.backend(name), step)
    check(together, step, result)
    start = 0
    for row in rows:
        alone = World(Shape(), seed)
        for layer, by_seat in together.truth.items():
            alone.store(layer, row.seat, by_seat[row.seat])
        alone.state.length[row.seat] = together.state.length[row.seat]
        part = slice(start, start + row.query_len)
        start += row.query_len
        own = Step(
            alone.metadata(plan(row)),
            {layer: entries[part] for layer, entries in step.new.items()},
            {layer: type(q)(q.q[part], q.index_q[part]) for layer, q in step.queries.items()},
        )
        single = run(alone.backend(name), own)
        assert torch.equal(single.blocks, result.blocks[part])
        for layer in (DENSE, SPARSE):
            torch.testing.assert_close(single.out[layer], result.out[layer][part], rtol=1e-5, atol=1e-5)


@BY_BACKEND
def test_prompts_of_unlike_length_in_one_prefill_equal_each_alone(name: str, seed: int) -> None:
    world = World(Shape(), seed)
    rows = [context(seat, 0, [1] * (length + 1), fresh=True) for seat, length in ((0, 5), (1, 9), (2, 2))]
    step = Step.random(world, plan(*rows))
    assert check(world, step, run(world.backend(name), step)) > 0


@BY_BACKEND
@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_what_lies_behind_the_last_token_in_its_page_changes_nothing(name: str, length: int) -> None:
    results = []
    for poison in (0.0, 1e4, NAN):
        world = World(Shape(poison=poison), seed=3)
        prefill = Step.random(world, plan(context(0, 0, [1] * (length + 1), fresh=True)))
        first = run(world.backend(name), prefill)
        world.state.length[0] = length
        second = run(world.backend(name), Step.random(world, plan(decode(0, length))))
        results.append((first, second))
    for first, second in results[1:]:
        for got, want in ((first, results[0][0]), (second, results[0][1])):
            assert torch.equal(got.blocks, want.blocks)
            assert torch.equal(got.out[DENSE], want.out[DENSE])
            assert torch.equal(got.out[SPARSE], want.out[SPARSE])


@BY_BACKEND
def test_blocks_are_cut_by_token_index_wherever_the_pages_lie(name: str) -> None:
    results = []
    for placement in ("ordered", "reversed", "fragmented"):
        world = World(Shape(placement=placement, max_model_len=96), seed=11)
        world.remember(0, 90)
        step = Step.random(world, plan(decode(0, 90, 3, max_length=96)))
        results.append(run(world.backend(name), step))
    for other in results[1:]:
        assert torch.equal(other.blocks, results[0].blocks)
        assert torch.equal(other.out[SPARSE], results[0].out[SPARSE])


@BY_BACKEND
def test_the_page_size_of_the_views_changes_nothing(name: str, seed: int) -> None:
    results = []
    for view in (16, 8, 4, 2, 1):
        world = World(Shape(page=16, max_model_len=160), seed)
        step = Step.random(world, mixed_rows(world))
        results.append((run(world.backend(name, view), step), world.pool.clone()))
    for other, pool in results[1:]:
        assert torch.equal(pool, results[0][1])
        assert torch.equal(other.blocks, results[0][0].blocks)
        assert torch.equal(other.out[DENSE], results[0][0].out[DENSE])
        assert torch.equal(other.out[SPARSE], results[0][0].out[SPARSE])


@BY_BACKEND
def test_dense_layers_read_the_prefix_that_was_already_cached(name: str, seed: int) -> None:
    world = World(Shape(), seed)
    world.remember(0, 8)
    step = Step.random(world, plan(context(0, 8, [1] * 5, write_from=8)))
    result = run(world.backend(name), step)
    check(world, step, result)
    alone = World(Shape(), seed)
    empty = run(alone.backend(name), Step(alone.metadata(plan(context(0, 0, [1] * 5))), step.new, step.queries))
    assert not torch.allclose(result.out[DENSE], empty.out[DENSE], atol=1e-2)


@BY_BACKEND
def test_a_hit_of_the_whole_prompt_attends_its_own_cached_entry_and_leaves_the_pool_as_it_was(
    name: str, seed: int
) -> None:
    world = World(Shape(), seed)
    world.remember(0, 8)
    before = world.pool.clone()
    step = Step.random(world, plan(context(0, 7, [42, -1], fresh=True, write_from=8)))
    check(world, step, run(world.backend(name), step))
    assert torch.equal(world.pool, before)


@BY_BACKEND
def test_a_draft_layer_never_attends_its_entry_at_index_0(name: str, seed: int) -> None:
    world = World(Shape(first_index_attended=1, poison=NAN), seed)
    world.remember(0, 9)
    for role in (core_layout.Role.K, core_layout.Role.V):
        view = world.layout.view(DENSE, role)
        for head in range(view.heads):
            start = view.offset(int(world.state.block_table[0, 0]), head, 0, 0)
            world.pool[start : start + view.row_bytes] = 255  # NaN
    step = Step.random(world, plan(decode(0, 9, 3), context(1, 0, [1, 2, 3], fresh=True)))
    result = run(world.backend(name), step)
    check(world, step, result)
    assert (result.out[DENSE][4] == 0).all()  # the first token of a sequence has nothing to attend there


@BY_BACKEND
def test_a_table_entry_behind_the_sequence_is_never_read(name: str, seed: int) -> None:
    world = World(Shape(), seed)
    world.remember(0, 6)
    world.state.block_table[0, 3:] = 2**30
    world.state.block_table[1] = 2**30
    step = Step.random(world, plan(decode(0, 6, 3)), pad_rows=3, pad_tokens=8)
    check(world, step, run(world.backend(name), step))


@BY_BACKEND
def test_selection_is_token_major_then_head_then_place(name: str) -> None:
    """Three tokens, two heads, two places: each pair of token and head asks for a block of its own."""
    shape = Shape(topk=2, max_model_len=64)
    world = World(shape, seed=5)
    world.remember(0, 48)
    wanted = {pair: number for number, pair in enumerate(itertools.product(range(3), range(2)))}
    entries = world.truth[SPARSE][0]
    index_k = torch.zeros_like(entries.index_k)
    index_q = torch.zeros(3, 2, shape.dim)
    for (t, head), block in wanted.items():
        index_k[block * shape.page + 1, block] = 1
        index_q[t, head, block] = 1
    world.store(SPARSE, 0, type(entries)(entries.k, entries.v, index_k))
    meta = world.metadata(plan(decode(0, 45, 2)))
    blocks = world.backend(name).select(SPARSE, index_q, meta)
    assert blocks.shape == (3, 2, 2)
    for (t, head), block in wanted.items():
        assert blocks[t, head].tolist() == [block, 11]


@BY_BACKEND
def test_equal_scores_are_resolved_to_the_lower_block(name: str) -> None:
    shape = Shape(topk=3, max_model_len=64)
    world = World(shape, seed=5)
    world.remember(0, 48)
    entries = world.truth[SPARSE][0]
    world.store(SPARSE, 0, type(entries)(entries.k, entries.v, torch.ones_like(entries.index_k)))
    meta = world.metadata(plan(decode(0, 47)))
    assert world.backend(name).select(SPARSE, torch.ones(1, 2, shape.dim), meta).tolist() == [[[0, 1, 11]] * 2]
    assert world.backend(name).select(SPARSE, torch.zeros(1, 2, shape.dim), meta).tolist() == [[[0, 1, 11]] * 2]


@BY_BACKEND
@pytest.mark.parametrize("decoding", [True, False])
def test_a_needle_in_any_block_of_a_long_context_is_selected(name: str, decoding: bool) -> None:
    shape = Shape(topk=2, max_model_len=168, num_seats=1)
    world = World(shape, seed=9)
    world.remember(0, 160)
    background = world.truth[SPARSE][0]
    index_k = background.index_k / background.index_k.norm(dim=1, keepdim=True)
    index_q = torch.nn.functional.normalize(world.numbers(4, 2, shape.dim), dim=2)
    row = decode(0, 156, 3, max_length=168) if decoding else context(0, 156, [1] * 5, max_length=168)
    for block in range(39):
        for head in range(2):
            keys = index_k.clone()
            keys[block * shape.page + block % shape.page] = 3 * index_q[0, head]
            world.store(SPARSE, 0, type(background)(background.k, background.v, keys))
            queries = index_q[:1, head : head + 1].expand(4, 2, shape.dim).contiguous()
            blocks = world.backend(name).select(SPARSE, queries, world.metadata(plan(row)))
            assert (blocks[:, :, 0] == block).all(), f"needle in block {block}"
            assert (blocks[:, :, 1] == 39).all()


@BY_BACKEND
def test_where_more_blocks_exist_than_are_chosen_the_choice_depends_on_the_query(name: str, seed: int) -> None:
    world = World(Shape(topk=2, max_model_len=168, num_seats=1), seed)
    world.remember(0, 160)
    meta = world.metadata(plan(decode(0, 160, 3, max_length=168)))
    chosen = {
        int(block)
        for _ in range(16)
        for block in world.backend(name).select(SPARSE, world.queries(4).index_q, meta)[:, :, 0].flatten()
    }
    assert len(chosen) > 20


@BY_BACKEND
def test_a_write_index_of_minus_one_changes_no_byte_in_any_role(name: str, seed: int) -> None:
    world = World(Shape(), seed)
    step = Step.random(world, plan(), pad_rows=2, pad_tokens=8)
    before = world.pool.clone()
    result = run(world.backend(name), step)
    assert torch.equal(world.pool, before)
    assert (result.out[DENSE] == 0).all()


@BY_BACKEND
def test_rows_of_a_fused_projection_are_taken_without_a_copy_beforehand(name: str, seed: int) -> None:
    """Queries and keys may be slices of one wider tensor."""
    world, plain = World(Shape(), seed), World(Shape(), seed)
    rows = plan(decode(0, 5, 3), context(1, 0, [1] * 6, fresh=True))
    for each in (world, plain):
        each.remember(0, 5)
    step = Step.random(plain, rows)
    want = run(plain.backend(name), step)

    def widened(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(1)
        return torch.cat([flat, flat, flat], dim=1)[:, flat.shape[1] : 2 * flat.shape[1]].view(rows.shape)

    strided = Step(
        world.metadata(rows),
        {layer: type(e)(*(widened(part) for part in e.parts())) for layer, e in step.new.items()},
        {layer: type(q)(widened(q.q), widened(q.index_q)) for layer, q in step.queries.items()},
    )
    got = run(world.backend(name), strided)
    assert torch.equal(world.pool, plain.pool)
    assert torch.equal(got.blocks, want.blocks)
    assert torch.equal(got.out[SPARSE], want.out[SPARSE])


@BY_BACKEND
@pytest.mark.parametrize("block", [2, 8])
def test_a_block_size_other_than_the_page_is_refused_with_both_numbers(name: str, block: int) -> None:
    world = World(Shape(page=4))
    geometry = Shape(page=block).geometry
    with pytest.raises(GeometryError, match=f"block size {block} is not the page size of 4"):
        BACKENDS[name](world.layout, world.pool, world.limits, world.state, geometry)


@BY_BACKEND
def test_parts_that_do_not_fit_are_refused_with_both_values(name: str) -> None:
    world, other = World(Shape(page=4)), World(Shape(page=16, max_model_len=160))
    build, geometry = BACKENDS[name], world.shape.geometry
    with pytest.raises(GeometryError, match="layout has 16 tokens per page, the limits 4"):
        build(other.layout, world.pool, world.limits, world.state, geometry)
    with pytest.raises(GeometryError, match=f"needed are {world.limits.num_slots} slots"):
        build(world.layout, world.pool[1:], world.limits, world.state, geometry)
    with pytest.raises(GeometryError, match="3 query heads are no multiple of 2 KV heads"):
        build(world.layout, world.pool, world.limits, world.state, Shape(num_q_heads=3).geometry)
    with pytest.raises(InvalidArgument):
        world.backend(name, tokens_per_page=3)
    with pytest.raises(GeometryError, match=r"layer 7 .* known are \[0, 1\]"):
        world.backend(name).layer(7)


@BY_BACKEND
def test_index_keys_go_with_sparse_layers_and_with_no_other(name: str) -> None:
    world = World(Shape())
    step = Step.random(world, plan(decode(0, 0)))
    new, backend = step.new[SPARSE], world.backend(name)
    with pytest.raises(GeometryError, match="layer 1 has sparse attention and was written no index keys"):
        backend.write(SPARSE, new.k, new.v, None, step.meta)
    with pytest.raises(GeometryError, match="layer 0 has full attention and was written with index keys"):
        backend.write(DENSE, new.k, new.v, new.index_k, step.meta)
    with pytest.raises(GeometryError, match="layer 0 has full attention and selects no blocks"):
        backend.select(DENSE, step.queries[DENSE].index_q, step.meta)


@BY_BACKEND
def test_random_batches_are_right_token_by_token(name: str, seed: int, soak: bool) -> None:
    rng = np.random.default_rng(seed)
    compared = 0
    for case in range(400 if soak else 12):
        shape = Shape(
            topk=int(rng.integers(1, 5)),
            num_local=int(rng.integers(0, 2)),
            poison=NAN if case % 2 else 1e4,
            element=core_layout.ElementType.BF16 if case % 3 == 0 else core_layout.ElementType.FP32,
        )
        world = World(shape, seed=int(rng.integers(1 << 30)))
        rows = []
        for seat in rng.permutation(shape.num_seats)[: int(rng.integers(1, shape.num_seats + 1))].tolist():
            length = int(rng.integers(0, 40))
            world.remember(seat, length)
            if rng.random() < 0.5:
                rows.append(decode(seat, length, int(rng.integers(0, 4)), max_length=int(rng.integers(length + 1, 48))))
            else:
                ids = [1] * int(rng.integers(2, 10))
                rows.append(context(seat, length, ids, write_from=length))
        step = Step.random(world, plan(*rows), pad_tokens=int(rng.integers(0, 48)))
        compared += check(world, step, run(world.backend(name), step))
    assert compared > 100
