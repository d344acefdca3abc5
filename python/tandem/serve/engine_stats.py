"""From the engine's own statistics to the plain ones that travel."""

from __future__ import annotations

from dataclasses import asdict

from tandem.engine.engine import FINISH_REASONS, EngineStats
from tandem.engine.speculation import RouteCounts
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, Pages, Rounds, Snapshot


def snapshot_of(stats: EngineStats) -> Snapshot:
    """The same counters."""
    counters, ledger = stats.scheduler, stats.ledger
    return Snapshot(
        running=counters.num_running,
        waiting=counters.num_waiting,
        pages=Pages(
            free=ledger.free,
            cached=ledger.cached,
            held=ledger.held,
            leased=ledger.leased,
            total=ledger.total,
            pending=counters.num_pending_pages,
        ),
        submitted=counters.num_submitted,
        finished={name: counters.num_finished[reason] for reason, name in FINISH_REASONS.items()},
        preemptions=counters.num_preemptions,
        prompt_tokens=counters.num_prompt_tokens,
        cached_tokens=counters.num_cached_tokens,
        generated_tokens=counters.num_generated_tokens,
        steps=stats.num_steps,
        failed_steps=counters.num_failed_steps,
        context_rows=counters.num_context_rows,
        decode_rows=counters.num_decode_rows,
        context_tokens=counters.num_context_tokens,
        decode_tokens=counters.num_decode_tokens,
        step_seconds=asdict(stats.times),
        rounds={
            COLD: _rounds(stats.speculation.cold),
            PREFIX_HIT: _rounds(stats.speculation.prefix_hit),
        },
    )


def _rounds(counts: RouteCounts) -> Rounds:
    return Rounds(num_rounds=counts.num_rounds, drafted=list(counts.drafted), accepted=list(counts.accepted))
