"""The thread that runs steps: in order, whatever they raise, and gone when nobody needs it."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.engine.step_thread import Pending, StepThread


def submit(thread: StepThread, job: Callable[[], Any]) -> Pending[Any]:
    pending = Pending(job)
    thread.submit(pending)
    return pending


def test_jobs_run_in_order_on_one_other_thread_while_the_submitter_goes_on() -> None:
    thread = StepThread()
    gate, seen = threading.Event(), []
    first = submit(thread, lambda: gate.wait(20) and seen.append("first"))
    second = submit(thread, lambda: seen.append("second") or threading.current_thread())
    assert seen == []
    gate.set()
    assert second.wait().name == "tandem-step"
    assert seen == ["first", "second"]
    assert first.wait() is None
    thread.close()


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_job_raises_is_raised_where_it_is_waited_for_and_the_next_one_runs(error: BaseException) -> None:
    thread = StepThread()

    def fail() -> None:
        raise error

    broken, sound = submit(thread, fail), submit(thread, lambda: 7)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            broken.wait()
        assert raised.value is error
    assert sound.wait() == 7
    thread.close()


def test_closing_runs_what_is_queued_and_may_be_repeated() -> None:
    thread = StepThread()
    done: list[int] = []
    for number in range(5):
        submit(thread, lambda number=number: done.append(number))
    thread.close()
    assert done == [0, 1, 2, 3, 4]
    thread.close()
    assert not thread._thread.is_alive()


def test_the_thread_ends_when_nobody_refers_to_it_and_keeps_nothing_of_its_jobs() -> None:
    thread = StepThread()
    tensor = torch.ones(4)
    kept = weakref.ref(tensor)
    pending = submit(thread, lambda tensor=tensor: float(tensor.sum()))
    del tensor
    assert pending.wait() == 4.0
    submit(thread, lambda: None).wait()
    gc.collect()
    assert kept() is None
    worker = thread._thread
    del thread
    gc.collect()
    worker.join(20)
    assert not worker.is_alive()
