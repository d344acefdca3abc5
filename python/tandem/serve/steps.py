"""What each step did: a bounded window of records beside counters that are never windowed."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    # The engine brings torch, which the process that answers with the records does without.
    from tandem.engine.engine import EngineCounters

DEFAULT_CAPACITY = 5000


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step that completed or failed.

    Attributes:
        step: its number, from 1.
        time: when it ended, seconds since the epoch.
        num_context_rows: rows that ran a part of a prompt. This and the next two are of what was planned since the
            record before: of the next step where one is planned while another runs.
        num_decode_rows: rows that generated.
        num_tokens: tokens that ran, verified drafts included.
        num_generated: tokens that requests kept.
        num_drafted: drafts verified.
        num_accepted: drafts kept.
        num_running: requests that have a seat now.
        num_waiting: requests that wait for one.
        plan_s: seconds that planning took.
        launch_s: seconds that handing the step over took; running it as well where steps do not overlap.
        wait_s: seconds that the engine's thread waited for the result.
        output_s: seconds that passing it on took.
        failed: the step raised, and its rows ended with the error.
    """

    step: int
    time: float
    num_context_rows: int
    num_decode_rows: int
    num_tokens: int
    num_generated: int
    num_drafted: int
    num_accepted: int
    num_running: int
    num_waiting: int
    plan_s: float
    launch_s: float
    wait_s: float
    output_s: float
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


class StepRecorder:
    """Makes a record of what changed between two snapshots of an engine; for `Engine.observe_steps`.

    Args:
        window: takes the records.
        start: the engine's counters before the first step to be recorded.
    """

    def __init__(self, window: StepWindow, start: EngineCounters) -> None:
        self._window = window
        self._before = start

    def __call__(self, stats: EngineCounters) -> None:
        """A step has ended."""
        now, before = stats.scheduler, self._before.scheduler
        times, times_before = stats.times, self._before.times
        self._window.add(
            StepRecord(
                step=stats.num_steps,
                time=time.time(),
                num_context_rows=now.num_context_rows - before.num_context_rows,
                num_decode_rows=now.num_decode_rows - before.num_decode_rows,
                num_tokens=(now.num_context_tokens + now.num_decode_tokens)
                - (before.num_context_tokens + before.num_decode_tokens),
                num_generated=now.num_generated_tokens - before.num_generated_tokens,
                num_drafted=now.num_drafted_tokens - before.num_drafted_tokens,
                num_accepted=now.num_accepted_tokens - before.num_accepted_tokens,
                num_running=now.num_running,
                num_waiting=now.num_waiting,
                plan_s=times.plan - times_before.plan,
                launch_s=times.launch - times_before.launch,
                wait_s=times.wait - times_before.wait,
                output_s=times.output - times_before.output,
                failed=now.num_failed_steps > before.num_failed_steps,
            )
        )
        self._before = stats
