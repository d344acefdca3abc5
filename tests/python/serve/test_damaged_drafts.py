"""A running server whose drafter reads its cache wrongly: every answer is right; the alarm and the canary say so."""

import re

import pytest

from tandem.engine.errors import InvalidParameterError
from tandem.eval.sources import word_problems
from tandem.serve.alarm_feed import expected_acceptance
from tests.python.serve.server_process import ServerProcess, serve_model

NUM_QUESTIONS = 6
NAMES = ("acceptance_alarm", "acceptance_alarms_total")
BASELINE = "0.98,0.03"


def ask_all(server: ServerProcess) -> list[str]:
    """The reply to each question, reasoning included."""
    replies = []
    for question in word_problems(NUM_QUESTIONS):
        messages = [{"role": "user", "content": question.question}]
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 300}
        message = server.post("/v1/chat/completions", body).json["choices"][0]["message"]
        replies.append(f"{message['reasoning_content']}|{message['content']}")
    return replies


def alarm_of(server: ServerProcess) -> tuple[float, float]:
    """(raised, times raised) of the cold route."""
    page = server.get("/metrics").body.decode()
    found = [re.search(rf'^tandem:{name}{{[^}}]*route="cold"[^}}]*}} (\S+)$', page, re.M) for name in NAMES]
    return tuple(float(match[1]) for match in found if match is not None)  # type: ignore[return-value]


def after_one_run_of_the_canary(server: ServerProcess) -> dict[str, set[bool]]:
    """Whether prompts failed, by route. Nothing is held afterwards, and neither the alarm nor a histogram was told."""
    server.wait_until(lambda: server.get("/v1/stats").json["canary"]["num_runs"] == 1, 60)
    stats = server.get("/v1/stats").json
    assert (stats["running"], stats["waiting"], stats["pages"]["held"], stats["pages"]["leased"]) == (0, 0, 0, 0)
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"]
    assert {alarm["evidence"] for alarm in stats["alarms"].values()} == {0}
    assert "e2e_request_latency_seconds_count" not in server.get("/metrics").body.decode()
    failed: dict[str, set[bool]] = {}
    for result in stats["canary"]["last"]:
        assert result["not_compared"] is None
        failed.setdefault(result["route"], set()).add(bool(result["faults"]))
    return failed


@pytest.mark.slow
def test_the_alarm_of_a_running_server_fires_while_every_answer_stays_right() -> None:
    options = ("--acceptance-baseline", BASELINE, "--canary", "3600")
    with serve_model("demo", *options) as server:
        assert after_one_run_of_the_canary(server) == {"cold": {False}, "prefix_hit": {False}}
        sound = ask_all(server)
        assert alarm_of(server) == (0.0, 0.0)
    with serve_model("demo", *options, "--damage", "draft-kv") as server:
        # The routes agree with each other; against the kept answers the first run shows every prompt.
        assert after_one_run_of_the_canary(server) == {"cold": {True}, "prefix_hit": {False}}
        assert ask_all(server) == sound
        assert alarm_of(server) == (1.0, 1.0)
    right = [question.answer in reply for question, reply in zip(word_problems(NUM_QUESTIONS), sound, strict=True)]
    assert sum(right) >= NUM_QUESTIONS - 1


@pytest.mark.parametrize(("rate", "prompt_sd", "draft_len"), [(0.9, 0.03, 0), (1.5, 0.03, 3), (0.9, 0.9, 3)])
def test_a_baseline_that_cannot_be_is_refused(rate: float, prompt_sd: float, draft_len: int) -> None:
    with pytest.raises(InvalidParameterError, match="acceptance_baseline"):
        expected_acceptance(rate, prompt_sd, draft_len)


def test_a_given_baseline_has_the_spread_of_rounds_that_its_rate_implies() -> None:
    baseline = expected_acceptance(0.5, 0.03, 1)
    assert (baseline.rate, baseline.prompt_sd) == (0.5, 0.03)
    assert baseline.round_sd == pytest.approx(0.5)
