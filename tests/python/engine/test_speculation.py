"""A drafter changes no token and no log-probability, whatever it proposes.

What it proposes depends on the text alone.
"""

import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem import LLM
from tandem.core import sched
from tandem.engine.errors import InvalidParameterError
from tandem.engine.outputs import RequestOutput, TokenLogprobs
from tandem.engine.params import SamplingParams
from tandem.models import CpuOps
from tandem.msa import AttentionBackend, StepMetadata
from tandem.spec import Drafter, DraftWorker, Verified
from tests.python.engine.checkpoint import make_checkpoint
from tests.python.engine.tiny_m3 import Speculation, TinyRig, Variation, make_rig
from tests.python.models.eagle3_support import TARGET, DraftShape, Pair, load_pair

VOCAB_SIZE = TARGET.vocab
PROMPT = [(5 + 37 * i) % VOCAB_SIZE for i in range(40)]
OTHERS = [[(9 + 11 * i + 3 * k) % VOCAB_SIZE for i in range(5 + 13 * k)] for k in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=20)
SEEDED = SamplingParams(
    temperature=1.3,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    logit_bias={3: 1.5},
    seed=42,
    max_tokens=24,
    logprobs=20,
)
MODES = {"greedy": GREEDY, "seeded": SEEDED}

Result = tuple[list[int], list[TokenLogprobs] | None]


@lru_cache
def pair() -> Pair:
    with tempfile.TemporaryDirectory() as folder:
        return load_pair(Path(folder), DraftShape(), CpuOps(), seed=11)


def result(output: RequestOutput) -> Result:
    assert output.error is None
    return output.token_ids, output.logprobs


@lru_cache
def plain(mode: str) -> Result:
    """The request by itself, on an engine without a drafter."""
    rig = make_rig(pair().target, Variation(enable_prefix_cache=False))
    return result(rig.generate(PROMPT, MODES[mode]))


class ScriptedWorker(DraftWorker):
    """Proposes the first ``right`` tokens of a known text, then wrong ones; the real drafter still writes its entries.

    ``right`` is taken from ``script``, round by round; the known text must be that of every row.
    """

    def __init__(
        self, drafter: Drafter, attention: AttentionBackend, draft_len: int, text: Sequence[int], script: Sequence[int]
    ) -> None:
        super().__init__(drafter, attention, draft_len)
        self._text = text
        self._script = itertools.cycle(script)

    def run(
        self,
        meta: StepMetadata,
        sampled: Tensor,
        verified: Verified,
        captured: Sequence[Tensor],
        proposing: Tensor | None = None,
    ) -> Tensor:
        drafts = super().run(meta, sampled, verified, captured, proposing)
        for row, newest in enumerate(meta.kv_len[verified.place].tolist()):
            right = next(self._script)
            for step in range(drafts.shape[1]):
                index = newest + 1 + step
                if index < len(self._text):
                    drafts[row, step] = (self._text[index] + (step >= right)) % VOCAB_SIZE
        return drafts


def speculating(variation: Variation, draft_len: int) -> TinyRig:
    return make_rig(pair().target, variation, speculation=Speculation(pair().drafter, draft_len))


def scripted(variation: Variation, draft_len: int, mode: str, script: Sequence[int]) -> TinyRig:
    text = [*PROMPT, *plain(mode)[0]]

    def make_worker(drafter: Drafter, attention: AttentionBackend, most: int) -> DraftWorker:
        return ScriptedWorker(drafter, attention, most, text, script)

    return make_rig(pair().target, variation, speculation=Speculation(pair().drafter, draft_len, make_worker))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("draft_len", range(8))
@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_changes_neither_tokens_nor_logprobs(mode: str, draft_len: int) -> None:
    """With hits of none, one and two pages, chunks of many sizes, overlap on and off, beside neighbours."""
    for hit, chunk, overlap in [(0, 64, False), (16, 9, True), (32, 16, False), (0, 17, True)]:
        rig = speculating(Variation(chunk=max(chunk, 1 + draft_len), overlap=overlap), draft_len)
        if hit > 0:
            rig.generate([*PROMPT[:hit], (PROMPT[hit] + 1) % VOCAB_SIZE], replace(GREEDY, max_tokens=1))
        neighbours = [rig.submit(other, replace(SEEDED, seed=k)) for k, other in enumerate(OTHERS)]
        output = rig.generate(PROMPT, MODES[mode])
        assert output.cached_tokens == hit
        assert result(output) == plain(mode), f"hit {hit}, chunk {chunk}, overlap {overlap}"
        assert all(neighbour.output.error is None for neighbour in neighbours)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("mode", "draft_len"), [("greedy", 1), ("seeded", 2), ("greedy", 3), ("seeded", 5), ("greedy", 7)]
)
def test_any_pattern_of_acceptance_gives_the_same_text(mode: str, draft_len: int, overlap: bool) -> None:
    rng = random.Random(draft_len)
    patterns = [[a] for a in range(draft_len + 1)]
    patterns += [[rng.randint(0, draft_len) for _ in range(9)] for _ in range(6)]
    for script in patterns:
        rig = scripted(Variation(overlap=overlap), draft_len, mode, script)
        assert result(rig.generate(PROMPT, MODES[mode])) == plain(mode), script
        stats = rig.engine.stats().scheduler
        if not overlap and script == [draft_len]:
            # The prefill's own token is no round; the others come draft_len + 1 a round.
            assert stats.num_rounds == -(-23 // (draft_len + 1))
            assert stats.num_accepted_tokens >= 23 - stats.num_rounds
        if script == [0]:
            assert (stats.num_accepted_tokens, stats.num_rounds) == (0, 23)
            assert stats.num_drafted_tokens == 23 * draft_len


def test_preemption_at_any_step_changes_nothing() -> None:
    num_preemptions = 0
    for delay, (mode, overlap) in zip(range(0, 14, 2), itertools.cycle(itertools.product(MODES, (False, True)))):
        rig = speculating(Variation(num_slots=7, chunk=16, overlap=overlap), 1)
        urgent = rig.submit(OTHERS[1], replace(GREEDY, max_tokens=70))
        for _ in range(delay):
            rig.engine.step()
        victim = rig.submit(PROMPT, replace(MODES[mode], priority=1))
        rig.run()
        assert result(victim.output) == plain(mode)
        assert urgent.output.finish_reason == "length"
        ledger = rig.scheduler.ledger()
        assert ledger.free + ledger.cached == ledger.total
        num_preemptions += victim.output.num_preemptions
    assert num_preemptions > 3


def test_rounds_are_the_same_after_a_hit_and_cold() -> None:
    """Draft tokens decide how many are accepted, so equal counts over many texts mean equal drafts."""

    def counts(before: sched.Stats, after: sched.Stats) -> tuple[int, int, int]:
        return (
            after.num_rounds - before.num_rounds,
            after.num_drafted_tokens - before.num_drafted_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
        )

    rig = speculating(Variation(num_slots=80), 3)
    accepted = 0
    for k in range(12):
        prompt = [(k * 7 + 5 * i * i) % VOCAB_SIZE for i in range(33 + k)]
        start = rig.engine.stats().scheduler
        cold = rig.generate(prompt, replace(GREEDY, max_tokens=40))
        middle = rig.engine.stats().scheduler
        warm = rig.generate(prompt, replace(GREEDY, max_tokens=40))
        end = rig.engine.stats().scheduler
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
        assert result(warm) == result(cold)
        assert counts(middle, end) == counts(start, middle)
        accepted += counts(start, middle)[2]
    assert accepted > 0


def test_what_follows_the_end_of_a_round_is_not_returned() -> None:
    """A stop id in the middle of an accepted round ends the text there."""
    text = plain("greedy")[0]
    for at in range(1, 12):
        stop = text[at]
        end = text.index(stop) + 1
        rig = scripted(Variation(), 5, "greedy", [5])
        output = rig.generate(PROMPT, replace(GREEDY, stop_token_ids=[stop]))
        assert output.token_ids == text[:end]
        assert output.finish_reason == "stop"
        assert output.logprobs == (plain("greedy")[1] or [])[:end]


def test_a_draft_length_needs_a_drafter_and_has_a_limit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    with pytest.raises(InvalidParameterError, match="draft_len=3 is not allowed: 0 without a drafter"):
        LLM(folder, draft_len=3)
    with pytest.raises(InvalidParameterError, match="draft_len=8 is not allowed: an integer from 0 to 7"):
        LLM(folder, drafter=tmp_path / "eagle3", draft_len=8)
