"""Metrics: names, values read back from the text, and counters that never fall."""

import dataclasses
import logging
import math
import random
import re
import threading

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.serve.metrics import ENGINE_METRICS, PREFIX, RequestTimings, ServerMetrics
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, Snapshot
from tests.python.serve.full_metrics import snapshot

Labels = tuple[tuple[str, str], ...]


def samples(metrics: ServerMetrics) -> dict[tuple[str, Labels], float]:
    """The samples as a Prometheus server would read them, each named once; the label ``model_name`` is checked."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == 'm"3'
            key = (sample.name.removeprefix(PREFIX), tuple(sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def of(found: dict[tuple[str, Labels], float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics('m"3')


def test_the_engines_counters_are_shown_as_they_are(metrics: ServerMetrics) -> None:
    metrics.update(snapshot())
    found = samples(metrics)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_pages_pending": 4,
        "kv_cache_usage_perc": 25 / 40,
        "requests_submitted_total": 9,
        "request_aborts_total": 1,
        "num_preemptions_total": 6,
        "prompt_tokens_total": 1000,
        "prompt_tokens_cached_total": 256,
        "generation_tokens_total": 77,
        "engine_steps_total": 50,
        "engine_steps_failed_total": 1,
    }
    assert {name: of(found, name) for name in expected} == expected
    assert [of(found, "kv_cache_pages", state=s) for s in ("free", "cached", "held", "leased")] == [10, 5, 20, 5]
    assert of(found, "request_success_total", finished_reason="stop") == 3
    assert of(found, "engine_step_rows_total", kind="context") == 11
    assert of(found, "engine_step_tokens_total", kind="decode") == 240
    assert of(found, "engine_step_seconds_total", part="model") == 2.5
    assert of(found, "spec_decode_num_drafts_total", route=COLD) == 10
    assert of(found, "spec_decode_num_draft_tokens_total", route=COLD) == 27
    assert of(found, "spec_decode_num_accepted_tokens_total", route=PREFIX_HIT) == 3
    assert of(found, "spec_decode_num_draft_tokens_per_pos_total", route=COLD, position="2") == 8
    assert of(found, "spec_decode_num_accepted_tokens_per_pos_total", route=PREFIX_HIT, position="1") == 1


def test_every_engine_metric_is_shown_and_its_name_is_a_prometheus_name(metrics: ServerMetrics) -> None:
    metrics.update(snapshot())
    shown = {name for name, _ in samples(metrics)}
    for metric in ENGINE_METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.name + ("_total" if metric.counts else "") in shown
    assert len({metric.name for metric in ENGINE_METRICS}) == len(ENGINE_METRICS)


def test_before_the_first_snapshot_there_is_no_value_rather_than_a_wrong_one(metrics: ServerMetrics) -> None:
    assert ("num_requests_running", ()) not in samples(metrics)


def test_a_counter_never_falls_and_the_fall_is_logged_once(
    metrics: ServerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.update(snapshot())
    with caplog.at_level(logging.WARNING):
        metrics.update(snapshot(generated_tokens=-1, running=0, finished={"stop": 2}))
        metrics.update(snapshot(generated_tokens=5, running=0))
    found = samples(metrics)
    assert of(found, "generation_tokens_total") == 77
    assert of(found, "request_success_total", finished_reason="stop") == 3
    assert of(found, "num_requests_running") == 0
    assert sum("generation_tokens" in record.message for record in caplog.records) == 1
    metrics.update(snapshot(generated_tokens=78))
    assert of(samples(metrics), "generation_tokens_total") == 78


def test_requests_fill_the_histograms(metrics: ServerMetrics) -> None:
    ended = RequestTimings("stop", 100, 11, scheduled_s=0.2, first_token_s=0.5, total_s=1.5)
    metrics.observe_request(ended)
    metrics.observe_request(dataclasses.replace(ended, completion_tokens=1, total_s=0.5))
    metrics.observe_request(RequestTimings("abort", 100, 0, scheduled_s=None, first_token_s=None, total_s=0.1))
    found = samples(metrics)
    counts = {
        "time_to_first_token_seconds": (2, 1.0),
        "time_per_output_token_seconds": (1, 0.1),
        "e2e_request_latency_seconds": (3, 2.1),
        "request_queue_time_seconds": (2, 0.4),
        "request_prompt_tokens": (3, 300),
        "request_generation_tokens": (3, 12),
    }
    for name, (count, total) in counts.items():
        assert of(found, f"{name}_count") == count
        assert of(found, f"{name}_sum") == pytest.approx(total)
    assert of(found, "time_to_first_token_seconds_bucket", le="0.25") == 0
    assert of(found, "time_to_first_token_seconds_bucket", le="0.5") == 2


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_value_that_cannot_be_is_logged_and_left_out(
    metrics: ServerMetrics, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    with caplog.at_level(logging.WARNING):
        metrics.observe_request(RequestTimings("stop", 5, 2, scheduled_s=value, first_token_s=0.1, total_s=0.2))
    found = samples(metrics)
    assert ("request_queue_time_seconds_count", ()) not in found
    assert of(found, "e2e_request_latency_seconds_count") == 1
    assert [repr(value) in record.message for record in caplog.records] == [True]


def test_alarms_are_shown_by_route(metrics: ServerMetrics) -> None:
    found = samples(metrics)
    assert not any(name.startswith("acceptance") for name, _ in found)
    metrics.update(snapshot())
    found = samples(metrics)
    assert of(found, "acceptance_alarm", route=PREFIX_HIT) == 1
    assert of(found, "acceptance_alarms_total", route=PREFIX_HIT) == 2
    assert of(found, "acceptance_alarm_evidence", route=PREFIX_HIT) == 1.5
    assert of(found, "acceptance_alarm", route=COLD) == 0


def test_refusals_and_canaries_are_counted(metrics: ServerMetrics) -> None:
    for code in (429, 429, 400):
        metrics.count_refused(code)
    metrics.count_canary(COLD, failed=False)
    metrics.count_canary(PREFIX_HIT, failed=True)
    found = samples(metrics)
    assert of(found, "requests_refused_total", code="429") == 2
    assert of(found, "canary_runs_total", route=COLD) == of(found, "canary_runs_total", route=PREFIX_HIT) == 1
    assert of(found, "canary_failures_total", route=COLD) == 0
    assert of(found, "canary_failures_total", route=PREFIX_HIT) == 1
    for failing in (2, 0):
        metrics.show_failing_canaries({PREFIX_HIT: failing})
        assert of(samples(metrics), "canary_failing", route=PREFIX_HIT) == failing


def test_scrapes_beside_updates_see_whole_numbers_that_never_fall(
    metrics: ServerMetrics, py_rng: random.Random
) -> None:
    steps = sorted(py_rng.sample(range(10_000), 300))

    def write() -> None:
        for step in steps:
            metrics.update(snapshot(steps=step, generated_tokens=step))

    metrics.update(snapshot(steps=0, generated_tokens=0))
    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        found = samples(metrics)
        assert of(found, "engine_steps_total") == of(found, "generation_tokens_total")
        seen.append(of(found, "engine_steps_total"))
    writer.join()
    assert seen == sorted(seen)
    assert of(samples(metrics), "engine_steps_total") == steps[-1]


def test_a_snapshot_survives_the_channel_between_processes() -> None:
    sent = msgspec.msgpack.encode(snapshot().to_dict())
    assert Snapshot.from_dict(msgspec.msgpack.decode(sent)) == snapshot()
    with pytest.raises(msgspec.ValidationError, match=r"pages\.free"):
        Snapshot.from_dict(snapshot().to_dict() | {"pages": {"free": "x"}})
