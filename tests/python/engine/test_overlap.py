"""Steps overlap with the planning of the next one, on a thread of their own; the text does not show it."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem import LLM, cli
from tandem.core import sched
from tandem.engine.params import SamplingParams
from tests.python.engine.checkpoint import make_checkpoint, make_drafter
from tests.python.engine.scripted import expected, make_rig
from tests.python.engine.test_speculation import GREEDY as GREEDY_TINY
from tests.python.engine.test_speculation import OTHERS, SEEDED, pair, result
from tests.python.engine.tiny_m3 import Speculation, Variation
from tests.python.engine.tiny_m3 import make_rig as make_tiny_rig

PROMPT = [100 + 7 * i % 150 for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "model")
    make_drafter(path / "eagle3", seed=1)
    return path


@pytest.mark.parametrize("draft_len", [None, 3])
def test_a_step_is_planned_and_launched_while_the_one_before_it_runs(draft_len: int | None) -> None:
    rig = make_rig(overlap=True, draft_len=draft_len, max_tokens_per_step=9)
    launch, launched = rig.engine._runner.launch, 0
    gate = threading.Semaphore(0)
    rig.model.before_forward = lambda meta: gate.acquire(timeout=20) or pytest.fail("the next step never came")

    def watched(plan: sched.StepPlan, requests: Any) -> Any:
        """Lets the step before the launched one go on, which cannot have ended until then."""
        nonlocal launched
        step = launch(plan, requests)
        launched += 1
        if rig.engine._in_flight:
            assert rig.engine._in_flight[0].outcome._done.locked()
            gate.release()
        return step

    rig.engine._runner.launch = watched
    collector = rig.submit(PROMPT, GREEDY)
    for _ in range(8):
        rig.engine.step()
    assert launched == 8
    rig.engine._runner.launch = launch
    gate.release(100)
    rig.run()
    assert collector.output.token_ids == expected(PROMPT, 12)
    rig.check_idle()


class NoOperation(TorchDispatchMode):
    """Refuses every torch operation of the thread that enters it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the engine's thread")


def test_with_overlap_the_engines_thread_makes_no_torch_call() -> None:
    def run(overlap: bool) -> None:
        rig = make_tiny_rig(pair().target, Variation(overlap=overlap), speculation=Speculation(pair().drafter, 3))
        with NoOperation():
            collectors = [rig.submit(OTHERS[1], GREEDY_TINY), rig.submit(OTHERS[2], SEEDED)]
            rig.run()
        for collector in collectors:
            result(collector.output)

    run(overlap=True)
    with pytest.raises(AssertionError):
        run(overlap=False)


def test_the_text_is_the_same_with_and_without_overlap(folder: Path) -> None:
    prompts = ["one", "a longer prompt than that", "x" * 50, "one"]
    params = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=2.0, seed=3, max_tokens=30, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=4, top_p=0.9, max_tokens=1),
        SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.5, max_tokens=25),
    ]
    outputs = []
    for overlap in (True, False):
        with LLM(folder, num_threads=1, max_seats=3, overlap=overlap) as llm:
            assert (llm._engine._runner._thread is not None) == overlap
            outputs.append(llm.generate(prompts, params, progress=False))
    for one, other in zip(*outputs, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
        assert (one.prompt_logprobs, one.finish_reason) == (other.prompt_logprobs, other.finish_reason)


def test_steps_run_with_the_number_of_threads_that_was_asked_for(folder: Path) -> None:
    before = torch.get_num_threads()
    with LLM(folder, num_threads=2) as llm:
        engine_thread = llm._engine.call(torch.get_num_threads).result()
        seen = []
        launch = llm._engine._runner._run_rows
        llm._engine._runner._run_rows = lambda *args: seen.append(torch.get_num_threads()) or launch(*args)
        llm.generate("x", GREEDY, progress=False)
    torch.set_num_threads(before)
    assert engine_thread == 2
    assert set(seen) == {2}


def test_overlap_can_be_turned_off_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--no-overlap"], ["--max-speculating-rows", "0"]):
        command = ["generate", "--model", str(folder), "--prompt", "hello", "--max-tokens", "12", "--num-threads", "1"]
        assert cli.main([*command, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        texts.append([line for line in lines if not line.startswith("[")])
        assert any("drafts accepted" in line for line in lines) == (options != ["--max-speculating-rows", "0"])
    assert texts[0] == texts[1] == texts[2]
