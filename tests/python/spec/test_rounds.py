"""Sequences in rounds of drafts, held against a slow loop over exact hidden states and against other chunkings."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models import ReferenceOps
from tandem.msa import AttentionBackend, CpuBackend, ReferenceBackend, StepMetadata
from tandem.spec import store_drafts, verify
from tests.python.models.eagle3_support import CLASSIC, DraftShape, Oracle, Pair, load_pair
from tests.python.msa.plans import context, decode
from tests.python.spec.world import Text, World, greedy

KINDS = {
    "3.1": DraftShape(),
    "3.1 multi-head": DraftShape(kv_heads=4),
    "3.1 one wide KV head": DraftShape(heads=6, kv_heads=1, head_dim=16),
    "classic": CLASSIC,
    "norm before fc": DraftShape(fc_norm=False, norm_before_fc=True, own_head=True),
}
MARGIN = 1e-3
"""Below this gap between the two best logits, fp32 and double precision may propose different tokens."""
PairOf = Callable[[DraftShape], Pair]


def prompt_of(py_rng: random.Random, length: int) -> list[int]:
    return [py_rng.randrange(64) for _ in range(length)]


def world_of(
    pair: Pair, draft_len: int, max_length: int = 112, backend: type[AttentionBackend] = CpuBackend, **more: object
) -> World:
    return World(pair.target, pair.drafter, max_length, draft_len, backend=backend, **more)  # type: ignore[arg-type]


def states_of(pair: Pair, tokens: Sequence[int], backend: type[AttentionBackend] = CpuBackend) -> list[Tensor]:
    """The target's captured states of a whole text, from one pass over it."""
    return world_of(pair, 1, len(tokens) + 8, backend).prefill(0, tokens).captured


def check_against_oracle(shape: DraftShape, pair: Pair, text: Text, draft_len: int, states: list[Tensor]) -> int:
    """Assert that every round proposed what the slow loop does; return how many drafts were compared."""
    oracle = Oracle(shape, pair, text.tokens, states)
    compared = 0
    for played in text.rounds:
        for draft, (token, margin) in zip(played.drafts, oracle.round(played.num_known, draft_len), strict=True):
            if margin < MARGIN:
                break
            assert draft == token, f"round at {played.num_known} tokens"
            compared += 1
    return compared


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_propose_what_a_slow_loop_over_exact_hidden_states_proposes(
    kind: str, pair_of: PairOf, py_rng: random.Random
) -> None:
    shape = KINDS[kind]
    pair = pair_of(shape)
    for draft_len in (1, 3, 7):
        world = world_of(pair, draft_len)
        text = world.generate(prompt_of(py_rng, 40), 24, chunk=13)
        compared = check_against_oracle(shape, pair, text, draft_len, states_of(pair, text.tokens))
        assert compared > 0.9 * draft_len * len(text.rounds)


def test_the_reference_layers_and_backend_propose_the_same(
    tmp_path_factory: pytest.TempPathFactory, py_rng: random.Random
) -> None:
    shape = DraftShape()
    pair = load_pair(tmp_path_factory.mktemp("reference"), shape, ReferenceOps(), seed=11)
    text = world_of(pair, 3, backend=ReferenceBackend).generate(prompt_of(py_rng, 40), 8, chunk=13)
    states = states_of(pair, text.tokens, ReferenceBackend)
    assert check_against_oracle(shape, pair, text, 3, states) > 0.9 * 3 * len(text.rounds)


@pytest.mark.parametrize("kind", ["3.1", "classic"])
def test_any_chunking_gives_the_same_bits_as_one_pass(kind: str, pair_of: PairOf, py_rng: random.Random) -> None:
    pair = pair_of(KINDS[kind])
    prompt = prompt_of(py_rng, 50)
    whole = world_of(pair, 3)
    drafts = whole.prefill(0, prompt).drafts
    entries = whole.draft_entries(0, 1, len(prompt) + 1)
    assert torch.isfinite(entries).all()
    for chunk in (1, 2, 7, 15, 16, 17, 32, 49):
        world = world_of(pair, 3)
        assert torch.equal(world.prefill(0, prompt, chunk).drafts, drafts)
        assert torch.equal(world.draft_entries(0, 1, len(prompt) + 1), entries)


def patterns(draft_len: int) -> list[int]:
    """How many drafts to accept in successive rounds: every number after every other one."""
    return [n for first in range(draft_len + 1) for second in range(draft_len + 1) for n in (first, second)]


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("planned_ahead", [False, True])
def test_after_every_acceptance_pattern_text_and_draft_entries_are_those_of_a_teacher_forced_pass(
    draft_len: int, planned_ahead: bool, pair_of: PairOf, py_rng: random.Random
) -> None:
    """Entries that single steps left behind used to stay in some engines, which costs acceptance and nothing else."""
    pair = pair_of(KINDS["3.1"])
    prompt = prompt_of(py_rng, 29)
    accepted = patterns(draft_len)
    length = len(prompt) + 1 + sum(accepted) + len(accepted)
    truth = world_of(pair, draft_len, length + 32).decode_plainly(prompt, length + 8)
    world = world_of(pair, draft_len, length + 32)
    first = int(world.prefill(0, prompt, chunk=10).verified.newest[0])
    assert first == truth[len(prompt)]

    tokens = [*prompt, first]
    for wanted in accepted:
        known = len(tokens)
        right = truth[known : known + wanted]
        wrong = [(token + 1) % 64 for token in truth[known + wanted : known + draft_len]]
        text = world.decode(
            0, tokens, known + 1, script=lambda _, s=(*right, *wrong): list(s), ahead=planned_ahead * (1 + draft_len)
        )
        assert text.rounds[0].num_accepted == wanted
        tokens = text.tokens
        assert tokens == truth[: len(tokens)]
        forced = world_of(pair, draft_len, len(tokens) + 8)
        forced.prefill(0, tokens[:-1])
        valid = len(tokens) - 1
        assert torch.equal(world.draft_entries(0, 1, valid + 1), forced.draft_entries(0, 1, valid + 1))
        assert torch.equal(world.state.drafts[0], forced.state.drafts[0])


@pytest.mark.parametrize("draft_len", range(1, 8))
def test_output_is_the_same_for_every_draft_length(draft_len: int, pair_of: PairOf, py_rng: random.Random) -> None:
    pair = pair_of(KINDS["classic"])
    prompt = prompt_of(py_rng, 31)
    truth = world_of(pair, 1).decode_plainly(prompt, 64)
    text = world_of(pair, draft_len).generate(prompt, 24)
    assert text.tokens[:55] == truth[:55]


def test_a_target_that_agrees_with_its_drafter_accepts_every_draft(pair_of: PairOf, py_rng: random.Random) -> None:
    pair = pair_of(KINDS["3.1"])
    world: World

    def agree(meta: StepMetadata, logits: Tensor) -> Tensor:
        tokens = greedy(meta, logits)
        if meta.num_logits > 1:
            tokens[:3] = world.state.drafts[0]
        return tokens

    world = world_of(pair, 3, decide=agree)
    text = world.generate(prompt_of(py_rng, 30), 40)
    assert [played.num_accepted for played in text.rounds] == [3] * 10
    assert all(0 <= token < 64 for token in text.tokens)


def test_rows_of_every_kind_in_one_padded_step_get_the_drafts_they_get_alone(
    pair_of: PairOf, py_rng: random.Random
) -> None:
    pair = pair_of(KINDS["3.1"])
    prompts = [prompt_of(py_rng, length) for length in (33, 40, 25)]
    limit = {"max_length": 112}

    def worlds() -> World:
        world = world_of(pair, 3, seats=3)
        world.prefill(0, prompts[0])
        world.step([context(1, 0, prompts[1][:21], fresh=True, samples=False, **limit)], [])
        return world

    rows = [
        decode(0, 33, 3, **limit),
        context(1, 20, prompts[1][20:31], samples=False, **limit),
        context(2, 0, [*prompts[2], -1], fresh=True, **limit),
    ]
    together, alone = worlds(), worlds()
    drafts = together.step(rows, pad_rows=5, pad_tokens=60).drafts
    assert drafts.shape == (2, 3)
    singles = [alone.step([row]).drafts for row in rows]
    assert torch.equal(drafts, torch.cat(singles))
    for seat, end in ((0, 34), (1, 31), (2, 26)):
        entries = together.draft_entries(seat, 1, end)
        assert torch.isfinite(entries).all()
        assert torch.equal(entries, alone.draft_entries(seat, 1, end))


def test_rows_that_are_not_drafted_for_still_write_their_draft_entries(pair_of: PairOf, py_rng: random.Random) -> None:
    pair = pair_of(KINDS["3.1"])
    prompt = prompt_of(py_rng, 30)
    off, on = world_of(pair, 3), world_of(pair, 3)
    length = {"max_length": 112}
    for world, proposing in ((off, []), (on, [0])):
        world.step([context(0, 0, [*prompt, -1], fresh=True, **length)], proposing)
    assert off.state.drafts[0].tolist() == [-1, -1, -1]
    off.step([decode(0, 30, 0, **length)], [])
    on.step([decode(0, 30, 0, **length)], [0])
    assert torch.equal(off.draft_entries(0, 1, 32), on.draft_entries(0, 1, 32))


class OnDevice(TorchDispatchMode):
    """Refuses every operation whose result the host has to wait for: reading a value, or finding out a shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "unique"), name
        return func(*args, **(kwargs or {}))


def test_verification_and_drafting_bring_no_value_to_the_host(
    pair_of: PairOf, py_rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(pair_of(KINDS["classic"]), 3)
    world.prefill(0, prompt_of(py_rng, 30))
    outcomes = []
    run = world.worker.run

    def watched(meta: StepMetadata, sampled: Tensor, _: object, captured: list[Tensor], proposing: Tensor) -> Tensor:
        with OnDevice():
            again = verify(meta, sampled, fed)
            drafts = run(meta, sampled, again, captured, proposing)
            store_drafts(world.state, meta, drafts)
        outcomes.append(again.num_accepted.tolist())
        return drafts

    monkeypatch.setattr(world.worker, "run", watched)
    fed = world.state.drafts.clone()
    rows = [decode(0, 30, 3, max_length=112), context(1, 0, [*prompt_of(py_rng, 9), -1], fresh=True)]
    world.step(rows, [0])
    assert len(outcomes[0]) == 2
    with pytest.raises(AssertionError, match="_local_scalar_dense"), OnDevice():
        int(world.state.length[0])


def test_where_nothing_is_ever_drafted_the_draft_layer_is_filled_all_the_same(
    pair_of: PairOf, py_rng: random.Random
) -> None:
    pair = pair_of(KINDS["3.1"])
    prompt = prompt_of(py_rng, 30)
    none, some = world_of(pair, 0), world_of(pair, 3)
    text = none.generate(prompt, 12, chunk=9)
    assert some.generate(prompt, 12).tokens[: len(text.tokens)] == text.tokens
    assert all(played.drafts == [] and played.num_accepted == 0 for played in text.rounds)
    valid = len(text.tokens) - 1
    assert torch.equal(none.draft_entries(0, 1, valid + 1), some.draft_entries(0, 1, valid + 1))


def test_rows_that_do_not_propose_leave_the_drafts_of_those_that_do_as_they_were(
    pair_of: PairOf, py_rng: random.Random
) -> None:
    pair = pair_of(KINDS["3.1"])
    prompts = [prompt_of(py_rng, length) for length in (30, 21, 37)]
    rows = [context(seat, 0, [*prompt, -1], fresh=True, max_length=112) for seat, prompt in enumerate(prompts)]
    drafts = world_of(pair, 3, seats=3).step(rows).drafts
    for proposing in ([], [1], [0, 2], [0, 1, 2]):
        world = world_of(pair, 3, seats=3)
        some = world.step(rows, proposing).drafts
        for seat in range(3):
            expected = drafts[seat] if seat in proposing else torch.full((3,), -1)
            assert torch.equal(some[seat], expected)
            assert torch.equal(world.state.drafts[seat], expected)
            known = len(prompts[seat]) + 1
            assert torch.isfinite(world.draft_entries(seat, 1, known)).all()
            # Single steps write the entries of all drafts but the last.
            singles = world.draft_entries(seat, known, known + 2)
            assert torch.isfinite(singles).all() if seat in proposing else torch.isnan(singles).all()


def test_nothing_is_drafted_or_written_from_the_limit_of_a_sequence_on(pair_of: PairOf, py_rng: random.Random) -> None:
    pair = pair_of(KINDS["3.1"])
    limit = 44
    world = world_of(pair, 3, limit)
    first = int(world.prefill(0, prompt_of(py_rng, 33)).verified.newest[0])
    tokens = [1] * 33 + [first]
    while int(world.state.length[0]) < limit:
        text = world.decode(0, tokens, len(tokens) + 1)
        tokens = text.tokens
        known = int(world.state.length[0])
        for number, draft in enumerate(world.state.drafts[0].tolist(), start=1):
            assert (draft >= 0) == (known + number < limit)
    assert torch.isnan(world.draft_entries(0, limit, 48)).all()
    assert torch.isfinite(world.draft_entries(0, 1, limit)).all()
    # A step that was planned before the end was known finds nothing to write.
    before = world.pool.clone()
    world.step([decode(0, limit + 4, 3, max_length=limit)])
    assert torch.equal(world.pool, before)
    assert world.state.drafts[0].tolist() == [-1, -1, -1]
