"""Running one step's attention on a world, and holding what comes out against plain arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core import layout as core_layout
from tandem.msa import AttentionBackend, PlanRows, StepMetadata

from .worlds import DENSE, SPARSE, Entries, Queries, World, true_attention, true_blocks

TOLERANCE = {core_layout.ElementType.FP32: 2e-5, core_layout.ElementType.BF16: 2e-2}
NEAR_TIE = 1e-4


@dataclass
class Step:
    """Inputs of one step: new entries and queries of all its tokens, per layer."""

    meta: StepMetadata
    new: dict[int, Entries]
    queries: dict[int, Queries]

    @staticmethod
    def random(world: World, rows: PlanRows, **padding: int) -> "Step":
        meta = world.metadata(rows, **padding)
        layers = (DENSE, SPARSE)
        return Step(
            meta,
            {layer: world.entries(meta.num_tokens) for layer in layers},
            {layer: world.queries(meta.num_tokens) for layer in layers},
        )


@dataclass
class Result:
    """What a backend gave: blocks [T, Hk, topk] and outputs [T, Hq, D] per layer."""

    blocks: Tensor
    out: dict[int, Tensor]


def run(backend: AttentionBackend, step: Step) -> Result:
    """Write, select and attend in both layers."""
    dense, sparse = step.new[DENSE], step.new[SPARSE]
    backend.write(DENSE, dense.k, dense.v, None, step.meta)
    backend.write(SPARSE, sparse.k, sparse.v, sparse.index_k, step.meta)
    blocks = backend.select(SPARSE, step.queries[SPARSE].index_q, step.meta)
    out = {
        DENSE: backend.attend(DENSE, step.queries[DENSE].q, None, step.meta),
        SPARSE: backend.attend(SPARSE, step.queries[SPARSE].q, blocks, step.meta),
    }
    return Result(blocks, out)


def entries_after(world: World, step: Step, layer: int, seat: int) -> Entries:
    """A sequence's entries once the step has written: its history, with the step's tokens laid over it."""
    history, new = world.truth[layer][seat], step.new[layer]
    mine = [t for t in range(step.meta.num_tokens) if int(step.meta.token_seat[t]) == seat]
    places = {int(step.meta.write_index[t]): t for t in mine}
    length = max([*places, history.k.shape[0] - 1]) + 1
    source = [new[slice(places[j], places[j] + 1)] if j in places else history[slice(j, j + 1)] for j in range(length)]
    return Entries(*(torch.cat(column) for column in zip(*(entry.parts() for entry in source), strict=True)))


def check(world: World, step: Step, result: Result) -> int:
    """Asserts that blocks and outputs are right for every token; returns how many block sets were compared.

    A set whose last choice is a near tie is not compared; outputs are compared given the selection that was made.
    """
    shape = world.shape
    tolerance = TOLERANCE[shape.element]
    compared = 0
    seats = set(step.meta.token_seat[step.meta.kv_len > 0].tolist())
    cached = {(layer, seat): entries_after(world, step, layer, seat) for layer in (DENSE, SPARSE) for seat in seats}
    for t in range(step.meta.num_tokens):
        kv_len, seat = int(step.meta.kv_len[t]), int(step.meta.token_seat[t])
        if kv_len == 0:
            assert (result.blocks[t] == -1).all()
            assert (result.out[DENSE][t] == 0).all()
            assert (result.out[SPARSE][t] == 0).all()
            continue
        dense, sparse = cached[DENSE, seat], cached[SPARSE, seat]
        chosen = []
        truth = true_blocks(step.queries[SPARSE].index_q[t], sparse.index_k, kv_len, shape)
        for head, (ids, gap) in enumerate(truth):
            got = result.blocks[t, head].tolist()
            valid = [block for block in got if block >= 0]
            assert got == sorted(valid) + [-1] * (shape.topk - len(valid)), f"token {t} head {head}: {got}"
            if gap > NEAR_TIE:
                compared += 1
                assert valid == ids, f"token {t} head {head}"
            chosen.append(valid)
        first = shape.first_index_attended
        want = true_attention(step.queries[DENSE].q[t], dense, kv_len, None, shape, first)
        torch.testing.assert_close(result.out[DENSE][t].double(), want, rtol=tolerance, atol=tolerance)
        want = true_attention(step.queries[SPARSE].q[t], sparse, kv_len, chosen, shape)
        torch.testing.assert_close(result.out[SPARSE][t].double(), want, rtol=tolerance, atol=tolerance)
    return compared
