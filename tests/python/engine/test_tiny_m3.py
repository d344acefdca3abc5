"""The same request gives the same tokens and the same bits of logits, on tiny random M3 models in fp32.

Equal log-probabilities of the twenty best ids, each of which depends on every logit, stand for equal logits.
"""

import itertools
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tandem.core import cpu, layout
from tandem.engine.outputs import RequestOutput, TokenLogprobs
from tandem.engine.params import SamplingParams
from tandem.engine.poison import PoolPoison
from tests.python.engine.tiny_m3 import VOCAB_SIZE, TinyRig, Variation, make_tiny_rig

PROMPT = [(5 + 37 * i) % VOCAB_SIZE for i in range(24)]
OTHERS = [[(9 + 11 * i + 3 * k) % VOCAB_SIZE for i in range(5 + 7 * k)] for k in range(4)]

GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=20)
SEEDED = SamplingParams(temperature=1.5, top_p=0.95, frequency_penalty=0.3, seed=42, max_tokens=10, logprobs=20)
MODES = {"greedy": GREEDY, "seeded": SEEDED}

Result = tuple[list[int], list[TokenLogprobs] | None]


def result(output: RequestOutput) -> Result:
    assert output.error is None
    return output.token_ids, output.logprobs


@lru_cache
def alone(mode: str, block: int) -> Result:
    """The request by itself: one chunk, nothing cached, nothing beside it."""
    rig = make_tiny_rig(Variation(block=block, enable_prefix_cache=False))
    return result(rig.generate(PROMPT, MODES[mode]))


def prime(rig: TinyRig, hit: int) -> None:
    """Leave exactly the first ``hit`` tokens of the prompt in the cache."""
    if hit > 0:
        rig.generate([*PROMPT[:hit], (PROMPT[hit % 24] + 1) % VOCAB_SIZE], replace(GREEDY, max_tokens=1))


def check_split(mode: str, block: int, hit: int, chunk: int, *, overlap: bool) -> None:
    rig = make_tiny_rig(Variation(block=block, chunk=chunk, overlap=overlap))
    prime(rig, hit)
    output = rig.generate(PROMPT, MODES[mode])
    assert output.cached_tokens == hit
    assert result(output) == alone(mode, block), f"hit {hit}, chunk {chunk}"


@pytest.mark.parametrize("block", [4, 8])
def test_each_hit_length_with_a_few_chunk_sizes(block: int) -> None:
    """Each hit length and each chunk size occurs, in both modes and with overlap on and off."""
    chunks = itertools.cycle([1, 2, 3, 5, 7, 11, 23, 24, 25, 64])
    settings = itertools.cycle(itertools.product(MODES, (False, True)))
    for hit in [*range(0, 25, block)] * 2:
        mode, overlap = next(settings)
        check_split(mode, block, hit, next(chunks), overlap=overlap)


@pytest.mark.soak
@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_hit_length_and_chunk_size(mode: str, block: int, overlap: bool) -> None:
    for hit, chunk in itertools.product(range(0, 25, block), range(1, 27)):
        check_split(mode, block, hit, chunk, overlap=overlap)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("first", [False, True])
def test_neighbours_change_nothing(mode: str, chunk: int, first: bool) -> None:
    rig = make_tiny_rig(Variation(chunk=chunk, overlap=first))
    mine = rig.submit(PROMPT, MODES[mode]) if first else None
    for k, other in enumerate(OTHERS):
        rig.submit(other, replace(SEEDED, seed=k) if k % 2 else replace(GREEDY, max_tokens=3 + 5 * k))
    mine = mine or rig.submit(PROMPT, MODES[mode])
    rig.run()
    assert result(mine.output) == alone(mode, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delay", range(0, 16, 3))
def test_preemption_at_any_step_changes_nothing(mode: str, delay: int) -> None:
    rig = make_tiny_rig(Variation(num_slots=12, chunk=8, overlap=delay % 2 == 1))
    urgent = rig.submit(OTHERS[0], replace(GREEDY, max_tokens=34))
    for _ in range(delay):
        rig.engine.step()
    victim = rig.submit(PROMPT, replace(MODES[mode], priority=1))
    rig.run()
    assert result(victim.output) == alone(mode, 4)
    assert urgent.output.finish_reason == "length"
    if delay == 0:
        assert victim.output.num_preemptions > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    cpu.set_num_threads(threads)
    try:
        rig = make_tiny_rig(Variation(enable_prefix_cache=False))
        assert result(rig.generate(PROMPT, GREEDY)) == alone("greedy", 4)
    finally:
        cpu.set_num_threads(1)


def test_memory_that_nobody_wrote_is_never_read() -> None:
    """Reusing dirty slots, with NaN put into each as it is handed out, gives what clean ones give."""
    rig = make_tiny_rig(Variation(num_slots=24, chunk=7))
    for k in range(6):
        rig.generate(OTHERS[k % 4], replace(SEEDED, seed=k, max_tokens=30))
    assert result(rig.generate(PROMPT, GREEDY)) == alone("greedy", 4)
    clean = make_tiny_rig(Variation(num_slots=24, chunk=7, poison=False))
    assert result(clean.generate(PROMPT, GREEDY)) == alone("greedy", 4)


def test_poison_fills_what_is_handed_out_for_writing_and_leaves_hits_alone() -> None:
    pool = torch.zeros(4 * 8, dtype=torch.uint8)
    poison = PoolPoison(pool, slot_bytes=8, tokens_per_page=4)
    assert torch.isnan(pool.view(torch.float32)).all()
    pool.zero_()
    # Seat 5 has a hit of one page, slot 0, and gets slot 2 to write its tokens from index 4 on.
    changes = np.array([[5, 0, 0], [5, 1, 2]], dtype=np.int32)
    poison(SimpleNamespace(seat=np.array([5]), write_from=np.array([4]), table_changes=changes))
    assert torch.isnan(pool.view(torch.float32)).view(4, 2).all(dim=1).tolist() == [False, False, True, False]


def test_the_poison_is_seen_when_it_is_read() -> None:
    """The control: NaN put into a page that is in use ends the request with an error."""
    rig = make_tiny_rig(Variation())
    collector = rig.submit(PROMPT, GREEDY)
    for _ in range(3):
        rig.engine.step()
    rig.pool.fill_(0xFF)
    rig.run()
    assert collector.output.error == "the logits are not finite"


def test_every_split_of_a_prompt_into_primed_and_new_gives_the_cold_logits() -> None:
    """Prefill that starts behind cached pages, at every length of what was sent before."""
    cold = alone("greedy", 4)
    for split in range(1, 24, 3):
        rig = make_tiny_rig(Variation())
        rig.generate(PROMPT[:split], replace(GREEDY, max_tokens=1))
        assert result(rig.generate(PROMPT, GREEDY)) == cold


def test_bf16_keys_and_values_are_as_invariant_as_fp32_ones() -> None:
    outputs = []
    for chunk, with_neighbour in ((64, False), (5, True)):
        rig = make_tiny_rig(Variation(chunk=chunk), layout.ElementType.BF16)
        if with_neighbour:
            rig.submit(OTHERS[2], SEEDED)
        collector = rig.submit(PROMPT, GREEDY)
        rig.run()
        outputs.append(result(collector.output))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] != alone("greedy", 4)[1], "bf16 must round something"


def test_the_logits_depend_on_the_prompt() -> None:
    """The control of all the above: another prompt gives other bits."""
    rig = make_tiny_rig(Variation())
    assert result(rig.generate([*PROMPT[:-1], 1], GREEDY)) != alone("greedy", 4)
    assert torch.isfinite(torch.tensor([entry.logprob for entry in alone("greedy", 4)[1] or []])).all()
