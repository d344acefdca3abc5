"""The canary over an engine: silent when all is well, loud for tokens, acceptance and routes that were not taken."""

import asyncio
import dataclasses
import logging

import pytest

from tandem.engine.params import SamplingParams
from tandem.serve.canary import Canary, CanaryAnswer, CanaryPrompt, CanaryResult, first_difference
from tandem.serve.metrics_snapshot import COLD, HANDED_OVER, PREFIX_HIT
from tests.python.engine.scripted import Rig, make_rig

PROMPTS = [CanaryPrompt("one", tuple(range(10, 23)), 20), CanaryPrompt("two", tuple(range(30, 51)), 15)]


class Server:
    """Answers by an engine; ``damage`` changes an answer by route before it is given."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.salts: list[str] = []
        self.damage: dict[str, dict[str, object]] = {}

    async def send(self, prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens, cache_salt=salt)
        answer = CanaryAnswer.of_output(self.rig.generate(prompt.token_ids, params))
        route = PREFIX_HIT if salt in self.salts else COLD
        self.salts.append(salt)
        return dataclasses.replace(answer, **self.damage.get(route, {}))  # type: ignore[arg-type]


@pytest.fixture
def server() -> Server:
    return Server(make_rig(draft_len=3))


def run(canary: Canary) -> list[CanaryResult]:
    return asyncio.run(canary.run())


def faults(results: list[CanaryResult]) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(result.prompt, result.route): result.faults for result in results if result.faults}


def fewer(answer: CanaryAnswer, count: int) -> dict[str, object]:
    """What changes where so many drafts less are accepted: each costs a round of its own."""
    rounds = answer.num_rounds + count
    return {"num_rounds": rounds, "num_drafted": 3 * rounds, "num_accepted": answer.num_accepted - count}


def test_a_sound_server_has_no_faults_on_either_route_however_often_it_runs(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    canary = Canary(PROMPTS, server.send)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            results = run(canary)
            assert [(r.prompt, r.route) for r in results] == [
                ("one", COLD), ("one", PREFIX_HIT), ("two", COLD), ("two", PREFIX_HIT)
            ]  # fmt: skip
            assert faults(results) == {}
            assert [r.answer.cached_tokens for r in results] == [0, 12, 0, 20]
            assert all(r.answer.num_drafted > 0 for r in results)
    assert caplog.messages == []
    # Every run is cold first: no salt comes back in a later one.
    assert len(set(server.salts)) == len(server.salts) / 2 == 6


def test_other_traffic_neither_answers_for_the_canary_nor_from_it(server: Server) -> None:
    canary = Canary(PROMPTS, server.send)
    server.rig.generate(PROMPTS[0].token_ids, SamplingParams(temperature=0, max_tokens=20))
    assert faults(run(canary)) == {}
    again = server.rig.generate((*PROMPTS[1].token_ids, 7), SamplingParams(temperature=0, max_tokens=2))
    assert again.cached_tokens == 0


def test_a_wrong_token_is_a_fault_of_its_route_and_logged_when_it_comes_and_goes(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    run(canary)
    wanted = canary.expected["one"].token_ids
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            server.damage[PREFIX_HIT] = {"token_ids": (*wanted[:5], 299, *wanted[6:])}
            for _ in range(3):
                found = faults(run(canary))
                assert found == {("one", PREFIX_HIT): ("token 5 of 20 is not the expected one of 20",)}
            server.damage.clear()
            run(canary)
    assert caplog.messages == 2 * [
        "canary one on route prefix_hit: token 5 of 20 is not the expected one of 20",
        "canary one on route prefix_hit is as expected again",
    ]
    server.damage = {COLD: {"token_ids": wanted[:4]}}
    assert faults(run(canary)) == {("one", COLD): ("token 4 of 4 is not the expected one of 20",)}


def test_drafts_accepted_less_often_than_on_the_cold_route_are_a_fault_beyond_the_allowance(server: Server) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    sound = run(canary)[1].answer
    server.damage[PREFIX_HIT] = fewer(sound, 2)
    assert set(faults(run(canary))) == {("one", PREFIX_HIT)}
    canary.max_difference = 2
    assert faults(run(canary)) == {}
    server.damage = {COLD: fewer(sound, 3)}
    found = faults(run(canary))
    assert set(found) == {("one", COLD)}
    assert f"{sound.num_accepted - 3} of" in found["one", COLD][0]


def test_expected_answers_from_outside_show_a_fault_that_was_there_from_the_start(server: Server) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    run(canary)
    expected = canary.expected["one"]
    for damage in ({"token_ids": (1, 2)}, fewer(expected, expected.num_accepted)):
        server.damage = {COLD: damage, PREFIX_HIT: damage}
        assert ("one", COLD) in faults(run(Canary(PROMPTS[:1], server.send, expected={"one": expected})))


def test_a_route_that_was_not_taken_is_no_fault_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(make_rig(draft_len=3, enable_prefix_cache=False))
    canary = Canary(PROMPTS[:1], server.send)
    for _ in range(3):
        cold, hit = run(canary)
        assert (cold.faults, hit.faults, cold.not_compared) == ((), (), None)
        assert hit.not_compared == "nothing of the prompt was found cached, so the route was not tried"
    assert [message.count("the route was not tried") for message in caplog.messages] == [1]


def test_what_nobody_can_have_cached_is_a_fault(server: Server) -> None:
    server.damage[COLD] = {"cached_tokens": 4}
    assert "under a salt never used" in faults(run(Canary(PROMPTS[:1], server.send)))["one", COLD][0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_preemptions": 1, "cached_tokens": 4}, "it lost its seat to other requests"),
        ({"num_rounds": 2, "num_drafted": 6}, "not every round had drafts"),
        ({"num_rounds": 20, "num_drafted": 20}, "1 drafts are proposed in a round, 3 are expected"),
        ({"num_rounds": 0, "num_drafted": 0}, "0 drafts are proposed in a round, 3 are expected"),
    ],
)
def test_drafts_that_neighbours_or_options_change_are_not_compared(
    server: Server, change: dict[str, object], reason: str
) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    expected = run(canary)[0].answer
    server.damage[COLD] = change | {"num_accepted": 0}
    kept = Canary(PROMPTS[:1], server.send, expected={"one": expected})
    cold, hit = run(kept)
    assert (cold.faults, cold.not_compared) == ((), reason)
    assert hit.faults == ()
    assert hit.not_compared is not None
    # Tokens are compared whatever became of the drafts.
    server.damage[COLD]["token_ids"] = (1, 2)
    assert run(canary)[0].faults == ("token 0 of 2 is not the expected one of 20",)


def test_a_preempted_answer_is_not_taken_for_the_expected_one(server: Server) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    server.damage[COLD] = {"num_preemptions": 1, "token_ids": (1, 2)}
    run(canary)
    assert canary.expected == {}


def test_an_answer_that_failed_is_a_fault_and_its_prompt_is_sent_no_further(server: Server) -> None:
    canary = Canary(PROMPTS, server.send)
    server.damage[COLD] = {"error": "the generation failed: out of luck"}
    results = run(canary)
    assert faults(results) == {(name, COLD): ("the generation failed: out of luck",) for name in ("one", "two")}
    assert canary.expected == {}
    server.damage.clear()
    assert len(run(canary)) == 4


def test_further_routes_are_compared_as_well(server: Server) -> None:
    async def damaged(prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        answer = await server.send(prompt, salt)
        return dataclasses.replace(answer, **fewer(answer, 1))  # type: ignore[arg-type]

    canary = Canary(PROMPTS, server.send, further_routes={HANDED_OVER: damaged})
    assert set(faults(run(canary))) == {("one", HANDED_OVER), ("two", HANDED_OVER)}


def test_the_first_difference_of_two_sequences() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2
    assert first_difference([], [1]) == 0
