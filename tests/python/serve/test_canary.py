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
        output = self.rig.generate(prompt.token_ids, params)
        answer = CanaryAnswer(
            tuple(output.token_ids), output.cached_tokens, output.rounds.num_drafted, output.rounds.num_accepted
        )
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


def test_a_wrong_token_is_a_fault_of_its_route_and_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    run(canary)
    wanted = canary.expected["one"].token_ids
    server.damage[PREFIX_HIT] = {"token_ids": (*wanted[:5], 299, *wanted[6:])}
    with caplog.at_level(logging.ERROR):
        found = faults(run(canary))
    assert found == {("one", PREFIX_HIT): ("token 5 of 20 is not the expected one of 20",)}
    assert len(caplog.messages) == 1
    assert "canary one on route prefix_hit: token 5" in caplog.messages[0]
    server.damage = {COLD: {"token_ids": wanted[:4]}}
    assert faults(run(canary)) == {("one", COLD): ("token 4 of 4 is not the expected one of 20",)}


def test_drafts_accepted_less_often_than_on_the_cold_route_are_a_fault_beyond_the_allowance(server: Server) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    accepted = run(canary)[1].answer.num_accepted
    server.damage[PREFIX_HIT] = {"num_accepted": accepted - 2}
    assert set(faults(run(canary))) == {("one", PREFIX_HIT)}
    canary.max_difference = 2
    assert faults(run(canary)) == {}
    server.damage = {COLD: {"num_accepted": accepted - 3}}
    found = faults(run(canary))
    assert set(found) == {("one", COLD)}
    assert f"{accepted - 3} of" in found["one", COLD][0]


def test_expected_answers_from_outside_show_a_fault_that_was_there_from_the_start(server: Server) -> None:
    canary = Canary(PROMPTS[:1], server.send)
    run(canary)
    expected = canary.expected["one"]
    for damage in ({"token_ids": (1, 2)}, {"num_accepted": 0}):
        server.damage = {COLD: damage, PREFIX_HIT: damage}
        assert ("one", COLD) in faults(run(Canary(PROMPTS[:1], server.send, expected={"one": expected})))


def test_a_route_that_was_not_taken_is_a_fault() -> None:
    server = Server(make_rig(draft_len=3, enable_prefix_cache=False))
    found = faults(run(Canary(PROMPTS[:1], server.send)))
    assert found == {("one", PREFIX_HIT): ("nothing of the prompt was found cached, so the route was not tried",)}
    server.damage[COLD] = {"cached_tokens": 4}
    server.salts.clear()
    assert "under a salt never used" in faults(run(Canary(PROMPTS[:1], server.send)))["one", COLD][0]


def test_further_routes_are_compared_as_well(server: Server) -> None:
    async def damaged(prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        answer = await server.send(prompt, salt)
        return dataclasses.replace(answer, num_accepted=0)

    canary = Canary(PROMPTS, server.send, further_routes={HANDED_OVER: damaged})
    assert set(faults(run(canary))) == {("one", HANDED_OVER), ("two", HANDED_OVER)}


def test_the_first_difference_of_two_sequences() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2
    assert first_difference([], [1]) == 0
