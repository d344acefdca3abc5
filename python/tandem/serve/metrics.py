"""Prometheus metrics, named as vLLM names its own: the same words behind ``tandem:``.

Counters of the engine are cumulative there and shown as they are, so that a scrape that is missed loses nothing.
Nothing in here raises because of a value: metrics must not end a stream.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.engine.outputs import FinishReason
from tandem.serve.metrics_snapshot import Rounds, Snapshot

_log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "tandem:"

Sample = tuple[tuple[str, ...], float]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(mantissa * 10**power) for power in range(7) for mantissa in (1, 2, 5))


@dataclass(frozen=True)
class EngineMetric:
    """One metric read from a snapshot. ``labels`` are the names that its samples give values for."""

    name: str
    help: str
    counts: bool
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, read: Callable[[Snapshot], float]) -> EngineMetric:
    return EngineMetric(name, text, False, lambda s: [((), read(s))])


def _counter(name: str, text: str, read: Callable[[Snapshot], float]) -> EngineMetric:
    return EngineMetric(name, text, True, lambda s: [((), read(s))])


def _by_name(values: Mapping[str, float]) -> Iterator[Sample]:
    return (((name,), value) for name, value in values.items())


def _by_route(snapshot: Snapshot, read: Callable[[Rounds], float]) -> Iterator[Sample]:
    return (((route,), read(rounds)) for route, rounds in snapshot.rounds.items())


def _by_position(snapshot: Snapshot, read: Callable[[Rounds], list[int]]) -> Iterator[Sample]:
    for route, rounds in snapshot.rounds.items():
        for position, count in enumerate(read(rounds)):
            yield (route, str(position)), count


def _page_states(snapshot: Snapshot) -> Iterator[Sample]:
    pages = snapshot.pages
    return _by_name({"free": pages.free, "cached": pages.cached, "held": pages.held, "leased": pages.leased})


ENGINE_METRICS = (
    _gauge("num_requests_running", "Requests that have a seat.", lambda s: s.running),
    _gauge("num_requests_waiting", "Requests that wait for a seat.", lambda s: s.waiting),
    EngineMetric("kv_cache_pages", "Pages of the pool, by state.", False, _page_states, ("state",)),
    _gauge("kv_cache_pages_pending", "Held pages that only steps in flight still hold.", lambda s: s.pages.pending),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the pool that is neither free nor could be evicted: held or leased; 1 is all of it.",
        lambda s: (s.pages.held + s.pages.leased) / max(s.pages.total, 1),
    ),
    _counter("requests_submitted", "Requests that the engine took.", lambda s: s.submitted),
    EngineMetric(
        "request_success",
        "Requests ended, by reason, aborts and errors included.",
        True,
        lambda s: _by_name(s.finished),
        ("finished_reason",),
    ),
    _counter("request_aborts", "Requests ended by an abort.", lambda s: s.finished.get("abort", 0)),
    _counter("num_preemptions", "Times that a request lost its seat.", lambda s: s.preemptions),
    _counter("prompt_tokens", "Prompt tokens of admitted requests.", lambda s: s.prompt_tokens),
    _counter("prompt_tokens_cached", "Of those, found in the prefix cache.", lambda s: s.cached_tokens),
    _counter("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    _counter("engine_steps", "Steps completed, failed ones included: the progress counter.", lambda s: s.steps),
    _counter("engine_steps_failed", "Steps that raised.", lambda s: s.failed_steps),
    EngineMetric(
        "engine_step_rows",
        "Rows of steps, by kind.",
        True,
        lambda s: _by_name({"context": s.context_rows, "decode": s.decode_rows}),
        ("kind",),
    ),
    EngineMetric(
        "engine_step_tokens",
        "Tokens of steps, by kind of row; verified drafts included.",
        True,
        lambda s: _by_name({"context": s.context_tokens, "decode": s.decode_tokens}),
        ("kind",),
    ),
    EngineMetric(
        "engine_step_seconds",
        "Seconds spent in steps, by part.",
        True,
        lambda s: _by_name(s.step_seconds),
        ("part",),
    ),
    EngineMetric(
        "spec_decode_num_drafts",
        "Rounds: decode rows that verified drafts.",
        True,
        lambda s: _by_route(s, lambda rounds: rounds.num_rounds),
        ("route",),
    ),
    EngineMetric(
        "spec_decode_num_draft_tokens",
        "Drafts verified.",
        True,
        lambda s: _by_route(s, lambda rounds: sum(rounds.drafted)),
        ("route",),
    ),
    EngineMetric(
        "spec_decode_num_accepted_tokens",
        "Drafts accepted.",
        True,
        lambda s: _by_route(s, lambda rounds: sum(rounds.accepted)),
        ("route",),
    ),
    EngineMetric(
        "spec_decode_num_draft_tokens_per_pos",
        "Drafts verified, by place in the round.",
        True,
        lambda s: _by_position(s, lambda rounds: rounds.drafted),
        ("route", "position"),
    ),
    EngineMetric(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by place in the round.",
        True,
        lambda s: _by_position(s, lambda rounds: rounds.accepted),
        ("route", "position"),
    ),
    EngineMetric(
        "acceptance_alarm",
        "1 while drafts are accepted less often than they should be.",
        False,
        lambda s: _by_name({route: alarm.raised for route, alarm in s.alarms.items()}),
        ("route",),
    ),
    EngineMetric(
        "acceptance_alarm_evidence",
        "The alarm's statistic over its threshold; it is raised at 1 where the comparison of routes agrees.",
        False,
        lambda s: _by_name({route: alarm.evidence for route, alarm in s.alarms.items()}),
        ("route",),
    ),
    EngineMetric(
        "acceptance_alarms",
        "Times that the alarm was raised.",
        True,
        lambda s: _by_name({route: alarm.num_raised for route, alarm in s.alarms.items()}),
        ("route",),
    ),
)


@dataclass(frozen=True)
class RequestTimings:
    """A request that has ended. Seconds count from its arrival at the server; None for what it never reached."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    scheduled_s: float | None
    first_token_s: float | None
    total_s: float


class ServerMetrics:
    """All metrics of one server.

    Everything may be called from any thread.

    Args:
        model_name: the value of the label ``model_name``, which every sample bears.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Of one request, the mean time from one token to the next.",
            _TOKEN_SECONDS,
        )
        self._total = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LONG_SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", "Arrival to first step.", _LONG_SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._refused = self._labelled_counter("requests_refused", "Requests refused, by status code.", "code")
        self._canaries = self._labelled_counter("canary_runs", "Canary prompts replayed and compared.", "route")
        self._canary_failures = self._labelled_counter(
            "canary_failures", "Canary prompts that gave other tokens, or drafts accepted otherwise.", "route"
        )
        self._failing_canaries = Gauge(
            f"{PREFIX}canary_failing",
            "Canary prompts that failed when they were last replayed.",
            ["model_name", "route"],
            registry=self._registry,
        )

    def update(self, snapshot: Snapshot) -> None:
        """Show the engine's counters as they are now."""
        self._engine.update(snapshot)

    def observe_request(self, request: RequestTimings) -> None:
        """Add a request that has ended."""
        self._observe(self._prompt, request.prompt_tokens)
        self._observe(self._generated, request.completion_tokens)
        self._observe(self._total, request.total_s)
        if request.scheduled_s is not None:
            self._observe(self._queued, request.scheduled_s)
        if request.first_token_s is not None:
            self._observe(self._first_token, request.first_token_s)
            if request.completion_tokens > 1:
                decoding_s = request.total_s - request.first_token_s
                self._observe(self._per_token, decoding_s / (request.completion_tokens - 1))

    def count_refused(self, code: int) -> None:
        """Add a request answered with this HTTP status instead of being run."""
        self._refused.labels(self._model_name, str(code)).inc()

    def count_canary(self, route: str, failed: bool) -> None:
        """Add a canary prompt replayed on a route, and compared."""
        self._canaries.labels(self._model_name, route).inc()
        self._canary_failures.labels(self._model_name, route).inc(failed)

    def show_failing_canaries(self, counts: Mapping[str, int]) -> None:
        """Show how many of the prompts failed when they were last replayed, by route."""
        for route, count in counts.items():
            self._failing_canaries.labels(self._model_name, route).set(count)

    def render(self) -> bytes:
        """The text that `/metrics` answers with, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _observe(self, histogram: Histogram, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            _log.warning("a metric was given %r, which is no duration or count; it is left out", value)
            return
        histogram.labels(self._model_name).observe(value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", text, ["model_name"], registry=self._registry, buckets=buckets)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, ["model_name", label], registry=self._registry)


class _EngineCollector(Collector):
    """Shows the last snapshot. A counter that is given a lower value keeps the highest, and that is logged once."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._lock = threading.Lock()
        self._samples: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in ENGINE_METRICS}
        self._fell: set[str] = set()

    def update(self, snapshot: Snapshot) -> None:
        with self._lock:
            for metric in ENGINE_METRICS:
                samples = self._samples[metric.name]
                for labels, value in metric.read(snapshot):
                    samples[labels] = (
                        self._never_lower(metric.name, samples[labels], value)
                        if (metric.counts and labels in samples)
                        else value
                    )

    def _never_lower(self, name: str, before: float, value: float) -> float:
        if value >= before:
            return value
        if name not in self._fell:
            self._fell.add(name)
            _log.warning("the counter %s fell from %s to %s; the higher value stays", name, before, value)
        return before

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            shown = {name: dict(samples) for name, samples in self._samples.items()}
        for metric in ENGINE_METRICS:
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            made = family(f"{PREFIX}{metric.name}", metric.help, labels=["model_name", *metric.labels])
            for labels, value in shown[metric.name].items():
                made.add_metric([self._model_name, *labels], value)
            yield made
