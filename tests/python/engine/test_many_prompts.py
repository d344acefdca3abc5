"""The same tokens and the same bits of logits with and without a drafter, over many prompts at once."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem import LLM
from tandem.engine.params import SamplingParams
from tests.python.engine.checkpoint import make_checkpoint, make_drafter
from tests.python.engine.test_speculation import GREEDY, SEEDED, VOCAB_SIZE, pair, result
from tests.python.engine.tiny_m3 import Speculation, Variation, make_rig


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 60 tokens, some of which begin alike; greedy and seeded in turn, of different lengths."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(33)] for _ in range(3)]
    made = []
    for k in range(count):
        prompt = rng.choice(stems)[: rng.randint(0, 33)] + [
            rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 27))
        ]
        params = GREEDY if k % 2 == 0 else replace(SEEDED, seed=k)
        made.append((prompt, replace(params, max_tokens=rng.randint(1, 16), logprobs=3)))
    return made


def check_identity(count: int, seed: int, draft_lens: range, overlaps: list[bool]) -> int:
    """Of every request alone without a drafter, and of all together with one; how many drafts were accepted."""
    made = requests(count, seed)
    alone = make_rig(pair().target, Variation(enable_prefix_cache=False))
    expected = [result(alone.generate(prompt, params)) for prompt, params in made]
    rng = random.Random(seed + 1)
    accepted = 0
    for draft_len in draft_lens:
        for overlap in overlaps:
            variation = Variation(
                chunk=rng.choice([9, 17, 64]),
                num_slots=rng.choice([12, 20, 64]),
                max_speculating_rows=rng.choice([3, 8]),
                overlap=overlap,
            )
            rig = make_rig(pair().target, variation, speculation=Speculation(pair().drafter, draft_len))
            collectors = [rig.submit(prompt, params) for prompt, params in made]
            rig.run()
            for k, collector in enumerate(collectors):
                assert result(collector.output) == expected[k], f"request {k}, {draft_len} drafts, {variation}"
            stats, ledger = rig.engine.stats().scheduler, rig.scheduler.ledger()
            assert stats.num_rounds > 0
            assert ledger.free + ledger.cached == ledger.total
            accepted += stats.num_accepted_tokens
    return accepted


def test_a_drafter_changes_nothing_over_many_prompts(seed: int) -> None:
    assert check_identity(24, seed, range(1, 8), [True]) > 0


@pytest.mark.soak
def test_a_drafter_changes_nothing_over_200_prompts(seed: int) -> None:
    assert check_identity(200, seed, range(1, 8), [True, False]) > 0


@pytest.mark.parametrize("kinds", [{"dtype": "bfloat16"}, {"kv_dtype": "bfloat16"}])
def test_half_precision_speculates_and_gives_the_text_that_it_gives_without_a_drafter(
    kinds: dict[str, str], tmp_path: Path
) -> None:
    """Rounding is coarser, and the same for one token and for several."""
    folder = make_checkpoint(tmp_path / "model")
    make_drafter(folder / "eagle3", seed=1)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["one", "a longer prompt than that", "x" * 50]
    texts = []
    for drafter in ("auto", None):
        with LLM(folder, drafter=drafter, num_threads=1, **kinds) as llm:
            texts.append([output.token_ids for output in llm.generate(prompts, params, progress=False)])
            stats = llm.stats().scheduler
            assert (stats.num_drafted_tokens > 0) == (drafter == "auto")
    assert texts[0] == texts[1]
    assert all(len(text) == 40 for text in texts[0])
