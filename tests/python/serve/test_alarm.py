"""The acceptance alarm: its decisions, its estimates, and that the simulation decides as it does."""

import logging
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from tandem.serve import alarm
from tandem.serve.alarm import AcceptanceAlarm, Baseline, Learner, PromptRounds
from tandem.serve.metrics_snapshot import COLD, HANDED_OVER, PREFIX_HIT
from tools.perf import alarm_simulation as simulation

BASELINE = Baseline(0.83, prompt_sd=0.03, round_sd=0.33)
DRAFT_LEN = 3


class Traffic:
    """Prompts of 50 rounds in reports of ten, accepted as a rate says."""

    def __init__(self, watch: AcceptanceAlarm, rng: random.Random, prompt_sd: float = 0.03) -> None:
        self._watch, self._rng, self._sd = watch, rng, prompt_sd
        self._next = 0
        self.num_rounds = 0

    def prompt(self, route: str, rate: float) -> None:
        rate = min(max(self._rng.gauss(rate, self._sd), 0.0), 1.0)
        for _ in range(5):
            accepted = sum(self._rng.random() < rate for _ in range(10 * DRAFT_LEN))
            self._watch.report(route, self._next, 10, 10 * DRAFT_LEN, accepted)
            self.num_rounds += 10
        self._watch.end(self._next)
        self._next += 1

    def until(self, route: str, rate: float, reached: Callable[[], bool], cold: float = 0.83, limit: int = 400) -> int:
        """Prompts of a route beside as many cold ones, until something is reached."""
        for count in range(1, limit + 1):
            self.prompt(route, rate)
            if reached():
                return count
            self.prompt(COLD, cold)
        raise AssertionError(f"not reached in {limit} prompts")


def raised(watch: AcceptanceAlarm, route: str = PREFIX_HIT) -> bool:
    return watch.states()[route].raised


def test_a_fall_of_one_route_is_logged_once_and_cleared_when_it_recovers(
    py_rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    watch = AcceptanceAlarm(BASELINE)
    traffic = Traffic(watch, py_rng)
    with caplog.at_level(logging.INFO):
        for _ in range(200):
            traffic.prompt(PREFIX_HIT, 0.83)
            traffic.prompt(COLD, 0.83)
        assert caplog.messages == []
        assert traffic.until(PREFIX_HIT, 0.75, lambda: raised(watch)) < 60
        for _ in range(20):
            traffic.prompt(PREFIX_HIT, 0.75)
        assert len(caplog.messages) == 1
        assert caplog.records[0].levelno == logging.ERROR
        assert all(
            part in caplog.messages[0] for part in ("prefix_hit", "baseline of 0.830", "given", "cold meanwhile")
        )
        state = watch.states()[PREFIX_HIT]
        assert (state.raised, state.num_raised) == (True, 1)
        assert state.evidence >= 1
        assert not raised(watch, COLD)
        assert not raised(watch, HANDED_OVER)
        assert traffic.until(PREFIX_HIT, 0.83, lambda: not raised(watch)) < 60
    assert len(caplog.messages) == 2
    assert "cleared" in caplog.messages[1]
    assert traffic.until(PREFIX_HIT, 0.7, lambda: raised(watch)) < 60
    assert watch.states()[PREFIX_HIT].num_raised == 2


def test_when_all_routes_fall_only_the_cold_one_with_a_given_baseline_has_an_alarm(py_rng: random.Random) -> None:
    watch = AcceptanceAlarm(BASELINE)
    traffic = Traffic(watch, py_rng)
    for _ in range(200):
        traffic.prompt(PREFIX_HIT, 0.6)
        traffic.prompt(COLD, 0.6)
    assert raised(watch, COLD)
    assert not raised(watch)
    assert watch.states()[PREFIX_HIT].evidence > 1


def test_without_cold_traffic_a_given_baseline_stands_alone_and_a_learned_one_does_not(py_rng: random.Random) -> None:
    given, learned = AcceptanceAlarm(BASELINE), AcceptanceAlarm()
    learning = Traffic(learned, py_rng)
    for _ in range(alarm.MIN_LEARN_PROMPTS):
        learning.prompt(COLD, 0.83)
    assert learned.baseline is not None
    for watch, expected in ((given, True), (learned, False)):
        traffic = Traffic(watch, py_rng)
        traffic._next = 10_000
        for _ in range(100):
            traffic.prompt(PREFIX_HIT, 0.7)
        assert raised(watch) == expected
        assert watch.states()[PREFIX_HIT].evidence > 1


def test_nothing_is_tested_before_the_baseline_is_learned_and_a_change_of_traffic_begins_it_anew(
    py_rng: random.Random, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "MIN_LEARN_PROMPTS", 400)
    watch = AcceptanceAlarm()
    traffic = Traffic(watch, py_rng)
    with caplog.at_level(logging.INFO):
        for _ in range(alarm.MIN_LEARN_PROMPTS - 1):
            traffic.prompt(PREFIX_HIT, 0.3)
            traffic.prompt(COLD, 0.83)
        assert watch.baseline is None
        traffic.prompt(COLD, 0.83)
        assert watch.baseline is not None
        assert watch.baseline.rate == pytest.approx(0.83, abs=0.01)
        assert "learned from 400 cold prompts" in caplog.messages[0]
        for rate, word in ((0.57, "fell"), (0.83, "rose")):
            traffic.until(PREFIX_HIT, rate, lambda: watch.baseline is None, cold=rate, limit=60)
            assert word in caplog.messages[-1]
            assert all(not state.raised and state.evidence == 0 for state in watch.states().values())
            traffic.until(PREFIX_HIT, rate, lambda: watch.baseline is not None, cold=rate, limit=500)
            assert watch.baseline is not None
            assert watch.baseline.rate == pytest.approx(rate, abs=0.01)
    assert not raised(watch)


def test_prompts_that_differ_more_are_given_less_weight() -> None:
    uniform, various = Baseline(0.8, 0.02, 0.33), Baseline(0.8, 0.1, 0.33)
    odd = PromptRounds(100, 70.0, 300)
    assert uniform.evidence(odd)[0] > various.evidence(odd)[0] > 0
    assert uniform.evidence(odd)[1] < 0
    hopeless = PromptRounds(100, 0.0, 300)
    deviation = math.sqrt(uniform.variance(100))
    assert uniform.evidence(hopeless)[0] == pytest.approx(
        alarm.FALL / deviation * (alarm.MAX_SCORE - alarm.FALL / deviation / 2)
    )
    assert uniform.evidence(PromptRounds()) == (0.0, 0.0)


@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_a_rounds_deviation_follows_from_its_rate(rng: np.random.Generator, draft_len: int) -> None:
    kept = rng.random((200_000, draft_len)) < 0.7
    shares = np.cumprod(kept, axis=1).mean(axis=1)
    assert alarm.round_sd(float(shares.mean()), draft_len) == pytest.approx(float(shares.std()), rel=0.01)


def test_the_learner_finds_the_spread_between_prompts(rng: np.random.Generator) -> None:
    learner, mix = Learner(), simulation.Mix(prompt_sd=0.06)
    stream = simulation.Stream(rng, mix, num_servers=50)
    for _ in range(500):
        report = stream.report()
        for i in np.flatnonzero(report.ends):
            count = int(report.before[i] + report.rounds[i])
            learner.add(PromptRounds(count, float(report.shares_before[i] + report.shares[i]), 3 * count))
    found = learner.baseline()
    assert found is not None
    assert learner.num_prompts > 5000
    assert found.rate == pytest.approx(0.83, abs=0.005)
    assert found.prompt_sd == pytest.approx(0.06, rel=0.06)
    assert found.round_sd == pytest.approx(mix.baseline().round_sd, rel=0.02)


def test_what_cannot_be_learned_from_is_no_baseline() -> None:
    learner = Learner()
    for _ in range(alarm.MIN_LEARN_PROMPTS + 5):
        learner.add(PromptRounds(10, 10.0, 30))
    assert learner.baseline() is None


@pytest.mark.parametrize(
    ("values", "named"),
    [((1.0, 0.1, 0.3), "rate=1.0"), ((0.5, 0.0, 0.3), "prompt_sd=0.0"), ((0.5, 0.1, 0.6), "round_sd=0.6")],
)
def test_a_baseline_that_cannot_be_is_refused(values: tuple[float, float, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Baseline(*values)


@pytest.mark.parametrize("numbers", [(0, 0, 0), (2, 1, 1), (2, 6, 7), (2, 6, -1)])
def test_a_report_that_cannot_be_is_refused(numbers: tuple[int, int, int]) -> None:
    watch = AcceptanceAlarm(BASELINE)
    with pytest.raises(ValueError, match="cannot be"):
        watch.report(COLD, 1, *numbers)
    with pytest.raises(ValueError, match="route='warm'"):
        watch.report("warm", 1, 1, 3, 2)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("concurrency", [1, 5])
def test_the_simulation_decides_as_the_alarm_does(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, learned: bool, concurrency: int
) -> None:
    # Short learning and low thresholds, so that alarms, refusals and new beginnings all happen in a short run.
    for name, value in (("MIN_LEARN_PROMPTS", 20), ("REFINE_PROMPTS", 10), ("THRESHOLD", 3.0), ("MIN_PROMPTS", 3)):
        monkeypatch.setattr(alarm, name, value)
    monkeypatch.setattr(alarm, "CONFIRM_THRESHOLD", 0.5)
    mix = simulation.Mix(prompt_sd=0.06, prompt_rounds=30, concurrency=concurrency)
    num_servers = 12
    servers = simulation.Servers(None if learned else mix.baseline(), mix, num_servers)
    streams = {route: simulation.Stream(rng, mix, num_servers) for route in (PREFIX_HIT, COLD)}
    watches = [AcceptanceAlarm(None if learned else mix.baseline()) for _ in range(num_servers)]
    prompts = {route: np.zeros((concurrency, num_servers), dtype=np.int64) for route in streams}
    next_prompt, num_raised, largest = 1, 0, 0.0
    for turn in range(1500):
        route = PREFIX_HIT if turn % 2 else COLD
        streams[PREFIX_HIT].shift = 0.05 if turn % 600 > 400 else 0.0
        report = streams[route].report()
        (servers.take if route == PREFIX_HIT else servers.take_cold)(report)
        for i, watch in enumerate(watches):
            if watch._routes[PREFIX_HIT].raised:
                continue
            if prompts[route][report.place, i] == 0:
                prompts[route][report.place, i] = next_prompt
                next_prompt += 1
            prompt, rounds = int(prompts[route][report.place, i]), int(report.rounds[i])
            # Shares in thirds of a draft, as they were drawn.
            watch.report(route, prompt, rounds, rounds * 3, round(report.shares[i] * 3))
            if report.ends[i]:
                watch.end(prompt)
                prompts[route][report.place, i] = 0
        states = [watch.states()[PREFIX_HIT] for watch in watches]
        assert [state.raised for state in states] == servers.raised.tolist()
        evidence = np.array([state.evidence for state in states])
        largest = max(largest, float(evidence.max()))
        going = ~servers.raised
        np.testing.assert_allclose(evidence[going], (servers.fall / alarm.THRESHOLD)[going], rtol=1e-6, atol=1e-9)
        num_raised = int(servers.raised.sum())
    assert num_raised > 3
    assert largest > 1
    assert (servers.num_relearned > 0) == learned
