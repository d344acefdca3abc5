"""The engine's thread: it ends cleanly, and a fault of the loop leaves nobody waiting."""

import threading

import pytest

from tandem.engine.engine import Engine
from tandem.engine.errors import EngineClosedError
from tandem.engine.loop import EngineThread
from tandem.engine.params import SamplingParams
from tests.python.engine.scripted import Collector, expected, make_rig

GREEDY = SamplingParams(temperature=0, max_tokens=6)


class WaitingCollector(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.on_end = self.ended.set


def submit(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> WaitingCollector:
    collector = WaitingCollector()
    engine.submit(prompt, params, collector)
    return collector


def build() -> Engine:
    return make_rig().engine


def test_requests_of_other_threads_are_served_while_the_engine_sleeps_between_them() -> None:
    thread = EngineThread(build)
    for i in range(3):
        collector = submit(thread.engine, [10 + i])
        assert collector.ended.wait(20)
        assert collector.output.token_ids == expected([10 + i], 6)
    steps = thread.engine.num_steps
    assert steps >= 3 * 6
    thread.close()
    with pytest.raises(EngineClosedError):
        submit(thread.engine, [1])


def test_what_the_build_raises_reaches_the_caller() -> None:
    def broken() -> Engine:
        raise LookupError("no weights")

    with pytest.raises(LookupError, match="no weights"):
        EngineThread(broken)


def test_a_fault_of_the_loop_ends_every_request_with_its_message() -> None:
    rigs = []

    def make() -> Engine:
        rigs.append(make_rig(max_model_len=5000, num_slots=2000))
        return rigs[0].engine

    thread = EngineThread(make)

    def fault(plan: object, events: object) -> None:
        raise AssertionError("the books are wrong")

    running = submit(thread.engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4000))
    thread.engine._apply = fault
    assert running.ended.wait(20)
    assert (running.output.finish_reason, running.output.error) == (
        "error",
        "the engine stopped: the books are wrong",
    )
    with pytest.raises(EngineClosedError, match="the books are wrong"):
        submit(thread.engine, [1])
    thread.close()


def test_calls_run_on_the_engine_thread_and_their_errors_come_back() -> None:
    thread = EngineThread(build)
    engine = thread.engine
    assert engine.call(threading.current_thread).result().name == "tandem-engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result()
    assert engine.call(engine.stats).result().ledger.held == 0
    thread.close()
