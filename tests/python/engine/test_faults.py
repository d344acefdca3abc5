"""A fault at any place of any step fails the rows of that step, or stops the engine, and leaves nothing behind."""

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tandem.core import sched
from tandem.engine import runner
from tandem.engine.engine import Engine
from tandem.engine.errors import EngineClosedError
from tandem.engine.loop import EngineThread
from tandem.engine.params import SamplingParams
from tandem.engine.request import Request
from tests.python.engine.scripted import Collector, Rig, TokenCache, expected, make_rig

PROMPT = [100 + 7 * i % 150 for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("draft_len", [None, 3])
@pytest.mark.parametrize("place", ["before", "half_way"])
def test_chunks_launched_behind_one_that_failed_write_to_nobodys_pages(place: str, draft_len: int | None) -> None:
    """The seat's table is still that of its last owner, whose pages are in the prefix cache."""
    rig = make_rig(overlap=True, max_tokens_per_step=4, draft_len=draft_len)
    rig.generate(PROMPT, GREEDY)
    before = rig.scheduler.stats()
    getattr(rig.faults, place).add(before.num_planned_steps)
    other = [token + 1 for token in PROMPT]
    assert rig.generate(other, GREEDY).finish_reason == "error"
    assert rig.scheduler.stats().num_dropped_rows == before.num_dropped_rows + 1
    again = rig.generate(PROMPT, GREEDY)
    assert (again.cached_tokens, again.token_ids) == (24, expected(PROMPT, 8))
    assert rig.generate(other, GREEDY).token_ids == expected(other, 8)
    rig.check_idle()


@dataclass
class Fault:
    """Raises at one call of a function, before it does anything or after it has done it."""

    at: int
    afterwards: bool
    num_calls: int = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            fails = self.num_calls == self.at
            if fails and not self.afterwards:
                raise MemoryError("injected")
            result = function(*args, **kwargs)
            if fails:
                raise MemoryError("injected")
            return result

        return call


STEP_PLACES: dict[str, Callable[[Rig], tuple[Any, str]]] = {
    "launch": lambda rig: (rig.engine._runner, "launch"),
    "filling a seat": lambda rig: (rig.engine._runner._seats, "fill"),
    "derive": lambda rig: (runner, "derive"),
    "forward": lambda rig: (rig.model, "forward"),
    "logits": lambda rig: (rig.model, "logits"),
    "sample": lambda rig: (rig.engine._runner._seats, "decide"),
    "verify": lambda rig: (runner, "verify"),
    "advance": lambda rig: (runner, "advance"),
    "draft": lambda rig: (rig.engine._runner._draft_worker, "run"),
    "storing drafts": lambda rig: (runner, "store_drafts"),
    "results": lambda rig: (runner, "_row_results"),
    "collect": lambda rig: (rig.engine._runner, "collect"),
    "text": lambda rig: (Request, "take"),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", STEP_PLACES)
def test_a_fault_at_any_place_of_any_step_fails_its_requests_and_leaves_nothing(
    place: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the pages: other requests get their tokens, and each request ends once."""
    at = 0
    reasons: set[str] = set()
    fault = Fault(0, afterwards=False)
    while fault.num_calls >= at:
        at += 1
        for afterwards in (False, True):
            rig = make_rig(num_slots=24, max_tokens_per_step=7, overlap=overlap, draft_len=2)
            fault = Fault(at, afterwards)
            with monkeypatch.context() as patch:
                owner, name = STEP_PLACES[place](rig)
                patch.setattr(owner, name, fault.wrap(getattr(owner, name)))
                prompts = [PROMPT[:9], PROMPT[:6], PROMPT[9:11]]
                collectors = [rig.submit(prompt, replace(GREEDY, max_tokens=4)) for prompt in prompts]
                rig.run()
            for prompt, collector in zip(prompts, collectors, strict=True):
                output = collector.output
                reasons.add(output.finish_reason)
                assert output.token_ids == expected(prompt, 4)[: len(output.token_ids)]
                if output.finish_reason == "error":
                    assert output.error == "MemoryError: injected"
                else:
                    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)
            again = rig.generate(PROMPT[:9], GREEDY)
            assert again.token_ids == expected(PROMPT[:9], 8), f"call {at}, afterwards {afterwards}"
            rig.check_idle()
    assert at > 3
    assert reasons == {"error", "length"}


class BrokenScheduler:
    """Passes everything on, but for one call of one method."""

    def __init__(self, scheduler: sched.Scheduler, method: str, fault: Fault) -> None:
        self._scheduler, self._method, self._fault = scheduler, method, fault

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._scheduler, name)
        return self._fault.wrap(attribute) if name == self._method else attribute


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["plan", "complete"])
def test_a_fault_of_the_books_ends_all_requests_once_and_frees_pages_threads_and_memory(
    method: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is logged is kept by the test runner, with every frame of its traceback.
    monkeypatch.setattr(logging.getLogger("tandem.engine.loop"), "disabled", True)
    caches: list[weakref.ref[TokenCache]] = []
    for at, afterwards in [(1, False), (1, True), (2, True), (3, False), (4, True)]:
        fault = Fault(at, afterwards)
        rigs: list[Rig] = []
        collectors: list[Collector] = []

        def build(fault: Fault = fault, rigs: list[Rig] = rigs, collectors: list[Collector] = collectors) -> Engine:
            rigs.append(make_rig(max_tokens_per_step=7, overlap=overlap, draft_len=2))
            engine = rigs[0].engine
            engine._scheduler = BrokenScheduler(rigs[0].scheduler, method, fault)
            collectors.extend(rigs[0].submit(prompt, replace(GREEDY, max_tokens=4)) for prompt in (PROMPT, PROMPT[3:]))
            return engine

        thread = EngineThread(build)
        thread._thread.join(20)
        assert not thread._thread.is_alive()
        assert [collector.output.finish_reason for collector in collectors] == ["error", "error"]
        assert {collector.output.error for collector in collectors} == {"the engine stopped: injected"}
        with pytest.raises(EngineClosedError, match="injected"):
            rigs[0].submit(PROMPT, GREEDY)
        rigs[0].scheduler.bind_thread()
        rigs[0].check_idle()
        steps = rigs[0].engine._runner._thread
        assert steps is None or not steps._thread.is_alive()
        caches.append(weakref.ref(rigs[0].cache))
        thread.close()
        rigs.clear()
    del thread, build, steps
    gc.collect()
    assert [cache() for cache in caches] == [None] * 5


@pytest.mark.parametrize("overlap", [False, True])
def test_closing_before_any_step_ends_all_requests_once_and_frees_pages_and_the_thread(overlap: bool) -> None:
    step, ended = 0, 0
    while ended < 2:
        rig = make_rig(max_tokens_per_step=7, overlap=overlap, draft_len=2)
        collectors = [rig.submit(prompt, replace(GREEDY, max_tokens=4)) for prompt in (PROMPT, PROMPT[3:])]
        for _ in range(step):
            rig.engine.step()
        ended = sum(collector.done for collector in collectors)
        rig.engine.close()
        rig.engine.close()
        reasons = [collector.output.finish_reason for collector in collectors]
        assert sorted(reasons) == ["abort"] * (2 - ended) + ["length"] * ended
        rig.check_idle()
        steps = rig.engine._runner._thread
        assert steps is None or not steps._thread.is_alive()
        step += 1
    assert step > 6


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_no_step_may_raise_ends_the_engine_and_not_only_its_thread(
    error: type[BaseException], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request used to wait for ever where something other than an `Exception` ended the loop."""
    monkeypatch.setattr(logging.getLogger("tandem.engine.loop"), "disabled", True)
    collectors: list[Collector] = []

    def raise_it(meta: object) -> None:
        raise error("injected")

    def build() -> Engine:
        rig = make_rig(overlap=overlap)
        rig.model.before_forward = raise_it
        collectors.append(rig.submit(PROMPT, GREEDY))
        return rig.engine

    thread = EngineThread(build)
    thread._thread.join(20)
    assert not thread._thread.is_alive()
    assert collectors[0].output.error == "the engine stopped: injected"
    thread.close()
