"""The engine's counters as plain data, which can travel between processes."""

from __future__ import annotations

from typing import Any

import msgspec

COLD, PREFIX_HIT, HANDED_OVER = "cold", "prefix_hit", "handed_over"
"""Routes: what a sequence began with."""


class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """Slots by state; free + cached + held + leased = total. ``pending`` are held by steps in flight alone."""

    free: int
    cached: int
    held: int
    leased: int
    total: int
    pending: int = 0


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """What became of drafts on one route, since the start. ``drafted`` and ``accepted`` are by place in the round."""

    num_rounds: int
    drafted: list[int]
    accepted: list[int]


class AlarmState(msgspec.Struct, frozen=True, kw_only=True):
    """The acceptance alarm of one route; ``evidence`` is its statistic over the threshold, so it is raised at 1."""

    raised: bool
    evidence: float
    num_raised: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything below ``waiting`` counts since the start; ``step_seconds`` by part of a step.

    ``rounds`` and ``alarms`` are by route.
    """

    running: int
    waiting: int
    pages: Pages
    submitted: int
    finished: dict[str, int]
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    failed_steps: int
    context_rows: int
    decode_rows: int
    context_tokens: int
    decode_tokens: int
    step_seconds: dict[str, float]
    rounds: dict[str, Rounds]
    alarms: dict[str, AlarmState] = {}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Snapshot:
        """The inverse of `to_dict`. Raises `msgspec.ValidationError` that names the wrong field."""
        return msgspec.convert(values, cls)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and objects."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values
