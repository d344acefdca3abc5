"""Which rows have drafts: not those of requests that do not want any, and none where too many rows run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem import LLM
from tandem.core import sched
from tandem.engine.errors import InvalidParameterError
from tandem.engine.params import SamplingParams
from tandem.msa import AttentionBackend, StepMetadata
from tandem.spec import Drafter, DraftWorker, Verified
from tests.python.engine.checkpoint import make_checkpoint
from tests.python.engine.test_speculation import GREEDY, OTHERS, PROMPT, SEEDED, pair, plain, result
from tests.python.engine.tiny_m3 import Speculation, TinyRig, Variation, make_rig

OFF = replace(GREEDY, speculate=False)


@dataclass
class Recorder:
    """The drafts of every step, by seat."""

    steps: list[dict[int, list[int]]] = field(default_factory=list)

    def make_worker(self, drafter: Drafter, attention: AttentionBackend, most: int) -> DraftWorker:
        recorder = self

        class RecordingWorker(DraftWorker):
            def run(
                self,
                meta: StepMetadata,
                sampled: Tensor,
                verified: Verified,
                captured: Sequence[Tensor],
                proposing: Tensor | None = None,
            ) -> Tensor:
                drafts = super().run(meta, sampled, verified, captured, proposing)
                recorder.steps.append(dict(zip(meta.sample_seat.tolist(), drafts.tolist(), strict=True)))
                return drafts

        return RecordingWorker(drafter, attention, most)

    def take(self) -> list[list[list[int]]]:
        """Of the steps that sampled, since the last call."""
        steps = [list(step.values()) for step in self.steps if step]
        self.steps.clear()
        return steps


def recorded(variation: Variation, draft_len: int = 3) -> tuple[TinyRig, Recorder]:
    recorder = Recorder()
    return make_rig(
        pair().target, variation, speculation=Speculation(pair().drafter, draft_len, recorder.make_worker)
    ), recorder


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_without_speculation_leaves_pages_that_draft_like_a_cold_run(overlap: bool) -> None:
    """Prompt and text of the one are found by the other, whose drafts are those that it has without a hit."""
    rig, recorder = recorded(Variation(overlap=overlap))
    assert result(rig.generate(PROMPT, OFF)) == plain("greedy")
    assert rig.engine.stats().scheduler.num_rounds == 0
    assert all(draft == -1 for step in recorder.take() for row in step for draft in row)
    turn = [*PROMPT, *plain("greedy")[0], 5]
    warm = rig.generate(turn, GREEDY)
    assert warm.cached_tokens == (len(PROMPT) + 24 - 1) // 16 * 16
    drafts = recorder.take()
    cold_rig, cold_recorder = recorded(Variation(overlap=overlap))
    assert result(cold_rig.generate(turn, GREEDY)) == result(warm)
    assert drafts == cold_recorder.take()
    assert any(draft >= 0 for step in drafts for row in step for draft in row)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_with_and_without_drafts_in_one_step_are_as_they_are_alone(overlap: bool) -> None:
    params = [GREEDY, OFF, replace(SEEDED, speculate=False), SEEDED]
    rig, recorder = recorded(Variation(num_slots=80, overlap=overlap))
    together = [rig.submit(PROMPT if k < 2 else OTHERS[k - 1], each) for k, each in enumerate(params)]
    rig.run()
    mixed = [step for step in recorder.steps if len(step) == 4]
    assert len(mixed) > 5
    speculating = set()
    for step in mixed:
        speculating |= {seat for seat, drafts in step.items() if drafts != [-1, -1, -1]}
    assert len(speculating) == 2
    for k, each in enumerate(params):
        alone = make_rig(pair().target, Variation(enable_prefix_cache=False))
        assert result(together[k].output) == result(alone.generate(PROMPT if k < 2 else OTHERS[k - 1], each))


def rounds_of(variation: Variation) -> tuple[list[tuple[int, list[int]]], sched.Stats]:
    """Per step the rows that sampled and the drafts verified by each, and what it came to."""
    rig = make_rig(pair().target, variation, speculation=Speculation(pair().drafter, 3))
    plans: list[tuple[int, list[int]]] = []
    launch = rig.engine._runner.launch

    def watched(plan: sched.StepPlan, requests: dict[int, object]) -> object:
        plans.append((plan.num_sampling_rows, plan.num_drafts.tolist()))
        return launch(plan, requests)

    rig.engine._runner.launch = watched
    # They end one after the other, so that few are left.
    collectors = [rig.submit(other, replace(GREEDY, max_tokens=12 + 12 * k)) for k, other in enumerate(OTHERS)]
    rig.run()
    for other, collector in zip(OTHERS, collectors, strict=True):
        alone = make_rig(pair().target, Variation(enable_prefix_cache=False))
        assert result(collector.output) == result(
            alone.generate(other, replace(GREEDY, max_tokens=len(collector.output.token_ids)))
        )
    return plans, rig.engine.stats().scheduler


@pytest.mark.parametrize("overlap", [False, True])
def test_drafting_stops_while_many_rows_decode_and_comes_back(overlap: bool) -> None:
    variation = Variation(num_slots=80, overlap=overlap)
    plans, limited = rounds_of(replace(variation, max_speculating_rows=2))
    assert all(not any(drafts) for rows, drafts in plans if rows > 2)
    assert any(rows == 4 for rows, _ in plans)
    few = [drafts for rows, drafts in plans if rows <= 2]
    assert sum(drafts == [3] * len(drafts) for drafts in few) >= len(few) - 2
    _, free = rounds_of(variation)
    assert 0 < limited.num_rounds < free.num_rounds
    assert plans == rounds_of(replace(variation, max_speculating_rows=2))[0]
    _, never = rounds_of(replace(variation, max_speculating_rows=0))
    assert (never.num_rounds, never.num_drafted_tokens) == (0, 0)


def test_what_speculation_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="speculate='no' is not allowed: True or False"):
        SamplingParams(speculate="no")
    folder = make_checkpoint(tmp_path)
    with pytest.raises(
        InvalidParameterError, match=r"draft_len=\[2, 2\] is not allowed: .*one line of drafts, no tree"
    ):
        LLM(folder, drafter=tmp_path, draft_len=[2, 2])
    for rows in (-1, 1.5, True):
        with pytest.raises(
            InvalidParameterError, match=f"max_speculating_rows={rows} is not allowed: an integer of at"
        ):
            LLM(folder, max_speculating_rows=rows)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
