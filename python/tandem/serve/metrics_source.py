"""From an engine to what the metrics show; runs in the engine's process."""

from __future__ import annotations

from tandem.engine.engine import EngineStats
from tandem.engine.speculation import RouteCounts
from tandem.serve.alarm import AcceptanceAlarm
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, Pages, Rounds, Snapshot


def snapshot_of(stats: EngineStats, alarm: AcceptanceAlarm | None = None) -> Snapshot:
    """The engine's counters as plain data; without an alarm its metrics are absent."""
    scheduler, ledger, times = stats.scheduler, stats.ledger, stats.times
    speculation = stats.speculation
    return Snapshot(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        pages=Pages(
            free=ledger.free,
            cached=ledger.cached,
            held=ledger.held,
            leased=ledger.leased,
            total=ledger.total,
            pending=scheduler.num_pending_pages,
        ),
        submitted=scheduler.num_submitted,
        finished={reason.name.lower(): count for reason, count in scheduler.num_finished.items()},
        preemptions=scheduler.num_preemptions,
        prompt_tokens=scheduler.num_prompt_tokens,
        cached_tokens=scheduler.num_cached_tokens,
        generated_tokens=scheduler.num_generated_tokens,
        steps=stats.num_steps,
        failed_steps=scheduler.num_failed_steps,
        context_rows=scheduler.num_context_rows,
        decode_rows=scheduler.num_decode_rows,
        context_tokens=scheduler.num_context_tokens,
        decode_tokens=scheduler.num_decode_tokens,
        step_seconds={
            "plan": times.plan,
            "model": times.model,
            "sample": times.sample,
            "draft": times.draft,
            "output": times.output,
        },
        rounds={COLD: _rounds_of(speculation.cold), PREFIX_HIT: _rounds_of(speculation.prefix_hit)},
        alarms={} if alarm is None else alarm.states(),
    )


def _rounds_of(route: RouteCounts) -> Rounds:
    """Without the places at which nothing was ever drafted."""
    places = sum(drafted > 0 for drafted in route.drafted)
    return Rounds(
        num_rounds=route.num_rounds, drafted=list(route.drafted[:places]), accepted=list(route.accepted[:places])
    )
