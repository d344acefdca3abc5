"""The thread that makes an engine's torch calls, and what stands for a step that it has yet to run."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Pending(Generic[_T]):
    """What a job will return or raise.

    Waiting blocks in a lock, so a thread that waits leaves the interpreter to the one that works.
    """

    def __init__(self, job: Callable[[], _T]) -> None:
        self._job: Callable[[], _T] | None = job
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Run the job and keep what it returns or raises; called once."""
        assert self._job is not None
        try:
            self._result.append(self._job())
        # Raised again where somebody waits, whatever it is: a wait must not outlast its job.
        except BaseException as error:
            self._error = error
        # What the job refers to must not live as long as its result.
        self._job = None
        self._done.release()

    def wait(self) -> _T:
        """Block until the job has run; return what it returned, or raise what it raised."""
        with self._done:
            pass
        if self._error is not None:
            raise self._error
        return self._result[0]


class StepThread:
    """Runs jobs one after the other, in the order in which they were submitted.

    It ends with `close`, or when nobody refers to it any more.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        # The thread refers to the queue alone: whoever drops the last reference to an engine ends its thread.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="tandem-step", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._jobs.put, None)

    def submit(self, pending: Pending[_T]) -> None:
        """Queue a job."""
        self._jobs.put(pending)

    def close(self) -> None:
        """Run what is queued and wait for the end of the thread. May be called again."""
        self._finalizer()
        self._thread.join()


def _serve(jobs: queue.SimpleQueue[Pending[Any] | None]) -> None:
    while _run_next(jobs):
        pass


def _run_next(jobs: queue.SimpleQueue[Pending[Any] | None]) -> bool:
    """Apart, so that nothing of a job that has run stays referred to while the next one is waited for."""
    pending = jobs.get()
    if pending is None:
        return False
    pending.run()
    return True
