"""The engine's own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tandem.engine.engine import Engine

_log = logging.getLogger(__name__)


class EngineThread:
    """Drives an engine until it is closed.

    The engine is built on its thread, since its scheduler belongs to the thread that first calls it, and a thread keeps
    its own team of kernel threads.

    Args:
        build: makes the engine; called on the new thread.

    Raises:
        What ``build`` raises.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def engine(self) -> Engine:
        """The engine; only the calls that are open to any thread may be made."""
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        """Stop after the step that runs, end all requests, and wait for the thread."""
        self._stop.set()
        if self._engine is not None:
            self._engine.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
        # Whatever keeps the engine from being built is raised by the constructor, on the caller's thread.
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        cause: BaseException | None = None
        try:
            while not self._stop.is_set():
                if engine.wait_for_work():
                    engine.step()
        # A fault of the loop itself must not leave requests waiting for ever: they end with it as their error.
        except BaseException as error:
            _log.exception("the engine stopped")
            cause = error
        engine.close(cause)
