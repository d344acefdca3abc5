"""A snapshot with a value for everything, and the text of a server that has shown all of its metrics."""

from typing import Any

from tandem.serve.metrics import RequestTimings, ServerMetrics
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, AlarmState, Pages, Rounds, Snapshot


def snapshot(**changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "running": 3,
        "waiting": 2,
        "pages": Pages(free=10, cached=5, held=20, leased=5, total=40, pending=4),
        "submitted": 9,
        "finished": {"stop": 3, "abort": 1},
        "preemptions": 6,
        "prompt_tokens": 1000,
        "cached_tokens": 256,
        "generated_tokens": 77,
        "steps": 50,
        "failed_steps": 1,
        "context_rows": 11,
        "decode_rows": 60,
        "context_tokens": 800,
        "decode_tokens": 240,
        "step_seconds": {"plan": 0.25, "model": 2.5},
        "rounds": {
            COLD: Rounds(num_rounds=10, drafted=[10, 9, 8], accepted=[8, 6, 4]),
            PREFIX_HIT: Rounds(num_rounds=2, drafted=[2, 2, 2], accepted=[2, 1, 0]),
        },
        "alarms": {
            COLD: AlarmState(raised=False, evidence=0.1, num_raised=0),
            PREFIX_HIT: AlarmState(raised=True, evidence=1.5, num_raised=2),
        },
    }
    return Snapshot(**(values | changes))


def full_metrics(**changes: Any) -> ServerMetrics:
    """Metrics of which each has a sample; ``changes`` are those of `snapshot`."""
    metrics = ServerMetrics("m")
    metrics.update(snapshot(**changes))
    metrics.observe_request(RequestTimings("stop", 100, 11, scheduled_s=0.2, first_token_s=0.45, total_s=1.45))
    metrics.count_refused(429)
    metrics.count_canary(PREFIX_HIT, failed=False)
    metrics.show_failing_canaries({PREFIX_HIT: 0})
    return metrics
