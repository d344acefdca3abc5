"""From a running engine to the numbers shown, and to what the alarm is told and finds."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.outputs import RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.speculation import RoundCounts
from tandem.serve.alarm import AcceptanceAlarm, Baseline
from tandem.serve.alarm_feed import MIN_ROUNDS, report_request, with_alarms
from tandem.serve.canary import Canary, CanaryAnswer, CanaryPrompt
from tandem.serve.engine_stats import snapshot_of
from tandem.serve.metrics import ServerMetrics
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, Snapshot
from tests.python.engine import scripted
from tests.python.engine.scripted import Rig, ScriptedWorker, expected, make_rig

GREEDY = SamplingParams(temperature=0, max_tokens=9)
PROMPT = list(range(10, 23))


def snap(rig: Rig) -> Snapshot:
    return snapshot_of(rig.engine.stats())


def test_a_known_script_of_three_prompts_and_a_repeat_gives_exact_numbers() -> None:
    rig = make_rig(draft_len=3)
    rig.generate(PROMPT, GREEDY)
    first = snap(rig).rounds[COLD]
    for prompt in ([*range(40, 49)], [*range(60, 65)], PROMPT):
        rig.generate(prompt, GREEDY)
    shown = snap(rig)
    assert (shown.running, shown.waiting, shown.submitted) == (0, 0, 4)
    assert shown.prompt_tokens == 13 + 9 + 5 + 13
    assert shown.cached_tokens == 12
    assert shown.generated_tokens == 4 * 9
    assert shown.finished["length"] == 4
    assert sum(shown.finished.values()) == 4
    pages = shown.pages
    assert (pages.held, pages.leased, pages.pending) == (0, 0, 0)
    assert pages.free + pages.cached == pages.total == 64
    assert shown.steps > 0
    assert shown.failed_steps == shown.preemptions == 0
    assert set(shown.step_seconds) == {"plan", "launch", "wait", "model", "sample", "draft", "output"}
    assert first.drafted[0] == first.num_rounds > 0
    assert not any(first.drafted[3:])
    # The repeat is a hit, and its rounds are those of the first time.
    assert shown.rounds[PREFIX_HIT] == first
    assert shown.rounds[COLD].num_rounds > first.num_rounds
    metrics = ServerMetrics("m")
    metrics.update(Snapshot.from_dict(shown.to_dict()))
    assert b'tandem:prompt_tokens_cached_total{model_name="m"} 12.0' in metrics.render()


def test_numbers_of_now_and_aborts_are_shown_while_requests_run() -> None:
    rig = make_rig(max_seats=2)
    running = [rig.submit(PROMPT[i:], GREEDY) for i in range(3)]
    for _ in range(2):
        rig.engine.step()
    shown = snap(rig)
    assert (shown.running, shown.waiting) == (2, 1)
    assert shown.pages.held > 0
    rig.engine.abort(0)
    rig.run()
    assert snap(rig).finished["abort"] == 1
    assert len(running) == 3


def test_the_alarms_of_a_watch_are_part_of_the_snapshot() -> None:
    rig = make_rig()
    assert snap(rig).alarms == {}
    watch = AcceptanceAlarm(Baseline(0.8, 0.05, 0.3))
    shown = with_alarms(snap(rig), watch)
    assert shown.alarms == watch.states()
    assert {COLD, PREFIX_HIT} <= set(shown.alarms)
    assert shown.submitted == 0


def output(**changes: object) -> RequestOutput:
    made = RequestOutput(1, None, [1], "", [2], cached_tokens=0, finish_reason="stop", rounds=RoundCounts(10, 30, 3))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "route"),
    [
        ({}, COLD),
        ({"cached_tokens": 128}, PREFIX_HIT),
        ({"finish_reason": "abort"}, COLD),
        ({"finish_reason": "error"}, None),
        ({"num_preemptions": 1}, None),
        ({"rounds": RoundCounts(MIN_ROUNDS - 1, 3 * MIN_ROUNDS - 3, 0)}, None),
        ({"rounds": RoundCounts(10, 29, 3)}, None),
        ({"rounds": RoundCounts()}, None),
    ],
)
def test_the_alarm_is_told_of_fit_requests_on_their_route(changes: dict[str, object], route: str | None) -> None:
    watch = AcceptanceAlarm(Baseline(0.8, 0.05, 0.3))
    assert report_request(watch, output(**changes), draft_len=3) == (route is not None)
    told = [name for name, state in watch.states().items() if state.evidence > 0]
    assert told == ([] if route is None else [route])
    assert all(not watch._routes[name].prompts for name in watch.states())


class DamagedWorker(ScriptedWorker):
    """Proposes wrong tokens while ``damaged``; the entries that it writes stay right."""

    damaged = False

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        drafts = super().run(*arguments, **options)
        return torch.where(drafts >= 0, (drafts + 1) % scripted.VOCAB_SIZE, drafts) if self.damaged else drafts


@pytest.fixture
def damaged_rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(scripted, "ScriptedWorker", DamagedWorker)
    monkeypatch.setattr(DamagedWorker, "damaged", False)
    return make_rig(draft_len=3, num_slots=2000)


def test_damaged_drafts_of_one_route_raise_its_alarm_while_every_answer_is_right(
    damaged_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = AcceptanceAlarm(Baseline(0.34, 0.05, 0.35))
    params = SamplingParams(temperature=0, max_tokens=30)

    for count in range(25):
        prompt = [6 + (37 * count + 11 * place) % 256 for place in range(20)]
        for route in (COLD, PREFIX_HIT):
            monkeypatch.setattr(DamagedWorker, "damaged", route == PREFIX_HIT)
            output = damaged_rig.generate(prompt, params)
            assert output.token_ids == expected(prompt, 30)
            assert (output.cached_tokens > 0) == (route == PREFIX_HIT)
            assert report_request(watch, output, draft_len=3)
    assert watch.states()[PREFIX_HIT].raised
    assert not watch.states()[COLD].raised


def test_the_canary_finds_the_same_damage_at_once(damaged_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    salts = set[str]()

    async def send(prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        monkeypatch.setattr(DamagedWorker, "damaged", damage and salt in salts)
        salts.add(salt)
        params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens, cache_salt=salt)
        return CanaryAnswer.of_output(damaged_rig.generate(prompt.token_ids, params))

    canary = Canary([CanaryPrompt("only", tuple(range(10, 30)), 30)], send)
    for damage in (False, True):
        cold, hit = asyncio.run(canary.run())
        assert cold.faults == ()
        assert bool(hit.faults) == damage
        assert hit.answer.token_ids == cold.answer.token_ids
