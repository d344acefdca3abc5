"""What each step did: a bounded window of records beside counters that are never windowed."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import msgspec

DEFAULT_CAPACITY = 5000


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One completed step.

    Attributes:
        step_id: the scheduler's number.
        time: when it completed, seconds since the epoch.
        num_context_rows: rows that ran a part of a prompt.
        num_decode_rows: rows that generated.
        num_tokens: tokens that ran, verified drafts included.
        num_generated: tokens that requests kept.
        num_drafted: drafts verified.
        num_accepted: drafts kept.
        plan_s: seconds that planning took.
        launch_s: seconds that handing the step over took.
        wait_s: seconds that the engine's thread waited for the result.
        failed: the step raised, and its rows ended with the error.
    """

    step_id: int
    time: float
    num_context_rows: int
    num_decode_rows: int
    num_tokens: int
    num_generated: int
    num_drafted: int
    num_accepted: int
    plan_s: float
    launch_s: float
    wait_s: float
    failed: bool = False


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Records oldest first, all that were kept since they were last drained.

    ``num_dropped`` is how many more there were since then, which the bound pushed out. ``num_recorded`` counts all
    records since the start.
    """

    records: list[StepRecord]
    num_dropped: int
    num_recorded: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and objects."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


class StepWindow:
    """The last steps. One thread adds; any may read or drain, and each record is drained or dropped exactly once.

    Args:
        capacity: most records kept; the oldest is dropped for a new one.

    Raises:
        ValueError: `capacity` is below 1.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} is not allowed: a window keeps at least 1 record")
        self._records: deque[StepRecord] = deque(maxlen=capacity)
        self._num_dropped = 0
        self._num_recorded = 0
        self._lock = threading.Lock()

    def add(self, record: StepRecord) -> None:
        """Keep a record."""
        with self._lock:
            self._num_dropped += len(self._records) == self._records.maxlen
            self._num_recorded += 1
            self._records.append(record)

    def read(self) -> Window:
        """What is kept now; nothing changes."""
        with self._lock:
            return self._window()

    def drain(self) -> Window:
        """What is kept now, and forget it and the number dropped."""
        with self._lock:
            window = self._window()
            self._records.clear()
            self._num_dropped = 0
            return window

    def _window(self) -> Window:
        return Window(records=list(self._records), num_dropped=self._num_dropped, num_recorded=self._num_recorded)
