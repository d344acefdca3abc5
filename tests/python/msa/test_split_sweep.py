"""One prompt cut in every way: the cpu backend gives the same bits in fp32, the reference the same numbers."""

from random import Random

import pytest
import torch

from .plans import Row, context, decode, plan
from .steps import Step, run
from .worlds import BACKENDS, DENSE, SPARSE, Entries, Shape, World

LENGTH = 24
BY_BACKEND = pytest.mark.parametrize("name", sorted(BACKENDS))


class Prompt:
    """The entries and queries of 24 tokens in both layers, fed to a fresh world in parts."""

    def __init__(self, name: str, shape: Shape, seed: int) -> None:
        self._name, self._shape, self._seed = name, shape, seed
        source = World(shape, seed)
        self._new = {layer: source.entries(LENGTH) for layer in (DENSE, SPARSE)}
        self._queries = {layer: source.queries(LENGTH) for layer in (DENSE, SPARSE)}

    def feed(self, rows: list[Row], cached: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(blocks, dense, sparse) of the tokens from `cached` on; those before it are in the pages already."""
        world = World(self._shape, self._seed)
        for layer, entries in self._new.items():
            world.store(layer, 0, entries[slice(0, cached)])
        backend = world.backend(self._name)
        parts = []
        for row in rows:
            first = row.first_index
            part = slice(first, first + row.query_len)
            world.state.length[0] = first
            step = Step(
                world.metadata(plan(row)),
                {layer: entries[part] for layer, entries in self._new.items()},
                {layer: type(q)(q.q[part], q.index_q[part]) for layer, q in self._queries.items()},
            )
            result = run(backend, step)
            parts.append((result.blocks, result.out[DENSE], result.out[SPARSE]))
        blocks, dense, sparse = (torch.cat(column) for column in zip(*parts, strict=True))
        return blocks, dense, sparse

    def same(self, got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], skip: int, case: str) -> None:
        for mine, whole in zip(got, want, strict=True):
            if self._name == "cpu":
                assert torch.equal(mine, whole[skip:]), case
            else:
                torch.testing.assert_close(mine, whole[skip:], rtol=1e-5, atol=1e-5, msg=case)


def chunk(first: int, size: int) -> Row:
    return context(0, first, [1] * (size + 1), fresh=first == 0)


def chunks(first: int, size: int) -> list[Row]:
    return [chunk(start, min(size, LENGTH - start)) for start in range(first, LENGTH, size)]


@BY_BACKEND
@pytest.mark.parametrize("page", [4, 8, 16])
def test_every_hit_length_and_chunk_size_gives_what_one_prefill_gives(name: str, page: int, seed: int) -> None:
    prompt = Prompt(name, Shape(page=page, topk=2), seed)
    whole = prompt.feed(chunks(0, LENGTH))
    # The kernels cut the work differently for every size; the reference does not.
    thorough = name == "cpu" and page == 4
    for size in range(1, LENGTH + 1) if thorough else (1, 5, 16):
        prompt.same(prompt.feed(chunks(0, size)), whole, 0, f"chunks of {size}")
    for hit in range(1, LENGTH):
        for size in (1, 3, page, LENGTH) if thorough else (5, LENGTH):
            prompt.same(prompt.feed(chunks(hit, size), cached=hit), whole, hit, f"hit of {hit}, chunks of {size}")


@BY_BACKEND
def test_any_random_cut_into_chunks_and_verify_rows_gives_what_one_prefill_gives(name: str, seed: int) -> None:
    prompt = Prompt(name, Shape(page=4, topk=3), seed)
    whole = prompt.feed(chunks(0, LENGTH))
    rng = Random(seed)
    for case in range(20):
        rows: list[Row] = []
        start = 0
        while start < LENGTH:
            size = min(rng.randint(1, 7), LENGTH - start)
            rows.append(decode(0, start, size - 1) if size <= 4 and rng.random() < 0.5 else chunk(start, size))
            start += size
        prompt.same(prompt.feed(rows), whole, 0, f"case {case}: {[row.query_len for row in rows]}")


def test_neighbours_in_the_batch_change_no_bit_of_the_cpu_backend(seed: int) -> None:
    shape = Shape(page=4, topk=2)
    world = World(shape, seed)
    for seat, length in ((0, 13), (1, 30), (2, 5)):
        world.remember(seat, length)
    rows = [decode(1, 30, 1), decode(0, 13, 3), context(2, 5, [1] * 12)]
    step = Step.random(world, plan(*rows), pad_rows=5, pad_tokens=20)
    together = run(world.backend("cpu"), step)
    own = slice(2, 6)
    alone = Step(
        world.metadata(plan(rows[1])),
        {layer: Entries(*(part[own] for part in entries.parts())) for layer, entries in step.new.items()},
        {layer: type(q)(q.q[own], q.index_q[own]) for layer, q in step.queries.items()},
    )
    single = run(world.backend("cpu"), alone)
    assert torch.equal(single.blocks, together.blocks[own])
    assert torch.equal(single.out[DENSE], together.out[DENSE][own])
    assert torch.equal(single.out[SPARSE], together.out[SPARSE][own])
