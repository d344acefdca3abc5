"""The canary beside traffic: on servers of a scripted engine, whose tokens are all 7 and whose drafts are all wrong."""

import asyncio
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem import LLM, SamplingParams
from tandem.engine.errors import InvalidParameterError
from tandem.serve.canary import CanaryPrompt
from tandem.serve.canary_prompts import CanaryPrompts
from tandem.serve.canary_watch import CanaryWatch
from tandem.serve.engine_client import EngineClient
from tandem.serve.messages import Abort, Ready, Submit, params_of
from tandem.serve.metrics import ServerMetrics
from tandem.serve.options import EngineConfig, ServerOptions
from tests.python.serve.server_process import Answer, ServerProcess, serve_model, serve_scripted

pytestmark = pytest.mark.slow

GOOD = {"model": "scripted", "prompt": "x", "max_tokens": 3}
LONG = {"name": "long", "max_tokens": 4000, "prompt": "for ever"}


def line(name: str, prompt: str, tokens: list[int] | None = None, num_accepted: int = 0) -> dict[str, Any]:
    """A prompt for three tokens; ``tokens`` are expected."""
    rounds = {"num_rounds": 3, "num_drafted": 9, "num_accepted": num_accepted}
    expected = {} if tokens is None else {"expected": {"token_ids": tokens} | rounds}
    return {"name": name, "max_tokens": 3, "prompt": prompt} | expected


def serve(folder: Path, interval_s: float, *lines: dict[str, Any], engine: tuple[str, ...] = (), **options: Any) -> Any:
    """A server whose canary replays these lines; arguments as those of `serve_scripted`."""
    path = folder / "kept.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    canary = {"canary_interval_s": interval_s, "canary_prompts": str(path)}
    return serve_scripted(folder, *engine, **canary, **options)


def canary_of(server: ServerProcess) -> Any:
    return server.get("/v1/stats").json["canary"]


def wait_for_runs(server: ServerProcess, count: int) -> None:
    server.wait_until(lambda: canary_of(server)["num_runs"] >= count, 20)


def wait_for_long(server: ServerProcess) -> None:
    server.wait_until(lambda: server.get("/v1/stats").json["running"] == 1, 10)


def samples(server: ServerProcess) -> dict[str, float]:
    """Values by name and route."""
    families = text_string_to_metric_families(server.get("/metrics").body.decode())
    return {
        f"{sample.name.removeprefix('tandem:')} {sample.labels.get('route', '')}".strip(): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def end(server: ServerProcess) -> list[str]:
    """What the server logs until its orderly end."""
    server.signal(signal.SIGTERM)
    code, errors = server.wait(10)
    assert code == 0
    assert "Traceback" not in errors
    return [line for line in errors.splitlines() if line.removeprefix("WARNING ").startswith("tandem.")]


def post_in_background(server: ServerProcess, max_tokens: int) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    body = GOOD | {"max_tokens": max_tokens}
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    return thread, answers


def test_replays_that_have_ended_leave_no_room_behind(tmp_path: Path) -> None:
    with serve(tmp_path, 0.01, line("short", "short"), engine=("--interval", "0.005"), max_requests=1) as server:
        wait_for_runs(server, 2)
        with server.client().completions.create(**GOOD | {"max_tokens": 4000}, stream=True) as stream:
            assert next(iter(stream)).choices[0].text.startswith("abc")
            assert server.post("/v1/completions", GOOD).status == 429


def test_a_sound_engine_is_replayed_silently_on_both_routes_and_is_no_traffic(tmp_path: Path) -> None:
    lines = [line("first", "first"), line("second", "second", [7, 7, 7])]
    with serve(tmp_path, 0.02, *lines, engine=("--interval", "0.001")) as server:
        wait_for_runs(server, 3)
        assert server.post("/v1/completions", GOOD).status == 200
        shown, state = samples(server), canary_of(server)
        assert shown["canary_runs_total cold"] == shown["canary_runs_total prefix_hit"] >= 6
        assert [(r["prompt"], r["route"], r["faults"], r["not_compared"]) for r in state["last"]] == [
            (name, route, [], None) for name in ("first", "second") for route in ("cold", "prefix_hit")
        ]
        assert shown["canary_failures_total cold"] == shown["canary_failing cold"] == 0
        assert shown["e2e_request_latency_seconds_count"] == shown["time_per_output_token_seconds_count"] == 1
        assert shown["request_prompt_tokens_sum"] == 1
        assert end(server) == []


def test_tokens_and_drafts_that_are_not_the_kept_ones_and_failures_are_named_once(tmp_path: Path) -> None:
    lines = [
        line("tokens", "a text", [7, 7, 8]),
        line("drafts", "a text", [7, 7, 7], num_accepted=2),
        line("failure", "fail_after=1"),
        line("sound", "a text", [7, 7, 7]),
    ]
    with serve(tmp_path, 0.02, *lines) as server:
        wait_for_runs(server, 3)
        shown = samples(server)
        assert (shown["canary_failing cold"], shown["canary_failing prefix_hit"]) == (3, 1)
        assert shown["canary_failures_total cold"] >= 9
        assert canary_of(server)["last"][0]["faults"] == ["token 2 of 3 is not the expected one of 3"]
        assert server.post("/v1/completions", GOOD).status == 200
        said = end(server)
    assert [text.removeprefix("tandem.serve.canary: canary ") for text in said] == [
        "tokens on route cold: token 2 of 3 is not the expected one of 3",
        "tokens on route prefix_hit: token 2 of 3 is not the expected one of 3",
        "drafts on route cold: 0 of 9 drafts accepted, where 2 of 9 are expected",
        "failure on route cold: the generation failed: the script says so",
    ]


def test_users_find_the_queue_as_empty_as_without_a_canary(tmp_path: Path) -> None:
    with serve(tmp_path, 1, LONG, engine=("--interval", "0.05"), max_requests=1) as server:
        wait_for_long(server)
        thread, answers = post_in_background(server, 20)
        server.wait_until(lambda: server.get("/v1/stats").json["running"] == 2, 10)
        refused = server.post("/v1/completions", GOOD)
        assert refused.status == 429
        assert "1 generations run or wait, at most 1 may" in refused.json["error"]["message"]
        thread.join()
        assert answers[0].status == 200


def test_draining_ends_a_replay_at_once(tmp_path: Path) -> None:
    with serve(tmp_path, 1, LONG, engine=("--interval", "0.05"), shutdown_grace_s=100) as server:
        wait_for_long(server)
        assert end(server) == []


def test_what_users_have_running_when_the_server_drains_has_no_replay_beside_it(tmp_path: Path) -> None:
    with serve(tmp_path, 1, LONG, engine=("--interval", "0.05"), shutdown_grace_s=0.5) as server:
        wait_for_long(server)
        thread, answers = post_in_background(server, 4000)
        server.wait_until(lambda: server.get("/v1/stats").json["running"] == 2, 10)
        (said,) = end(server)
        thread.join()
    assert answers[0].status == 503
    assert "1 generations are aborted after 0.5 s of grace" in said


def test_an_engine_that_dies_under_a_replay_ends_the_server_in_order(tmp_path: Path) -> None:
    with serve(tmp_path, 0.01, LONG, engine=("--interval", "0.05")) as server:
        wait_for_long(server)
        os.kill(server.engine_pid, signal.SIGKILL)
        code, errors = server.wait(10)
    assert code == 3
    assert errors.count("the canary is left out while the engine cannot be asked") == 1
    assert "Traceback" not in errors


def test_an_engine_that_is_silent_is_left_alone_until_it_is_back(tmp_path: Path) -> None:
    with serve(tmp_path, 1.2, line("short", "short"), stall_s=0.8) as server:
        wait_for_runs(server, 1)
        engine, runs = server.engine_pid, canary_of(server)["num_runs"]
        wait_for_runs(server, runs + 1)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(2.7)
        os.kill(engine, signal.SIGCONT)
        wait_for_runs(server, runs + 2)
        assert canary_of(server)["skipped"] is None
        said = end(server)
    assert len(said) == 1
    assert "left out while the engine cannot be asked: the engine process has not been heard of" in said[0]


def test_while_the_model_is_loaded_nothing_is_replayed_or_said(tmp_path: Path) -> None:
    with serve(tmp_path, 0.05, line("short", "short"), engine=("--load-seconds", "0.5")) as server:
        wait_for_runs(server, 2)
        assert end(server) == []


def test_a_prompt_that_fills_no_page_ends_the_server_with_its_name(tmp_path: Path) -> None:
    lines = [line("fits", "abcd"), line("short", "abc")]
    with serve(tmp_path, 1, *lines, wait_ready=False) as server:
        code, errors = server.wait(20)
    assert code != 0
    assert "canary prompt short has 3 tokens; at least one page of the cache, 4, is needed" in errors


def test_without_the_option_nothing_is_replayed(tmp_path: Path) -> None:
    with serve_scripted(tmp_path) as server:
        assert "canary" not in server.get("/v1/stats").json
        assert not any(name.startswith("canary") for name in samples(server))
        assert server.get("/v1/stats").json["steps"] == 0


def test_a_replay_is_greedy_behind_all_others_under_its_salt_and_draws_no_seed(tmp_path: Path) -> None:
    async def sent() -> Submit:
        options = ServerOptions(engine=EngineConfig(model="x"), model_path=tmp_path, served_model_name="x")
        metrics = ServerMetrics("x")
        client = EngineClient(options, metrics.observe_request)
        client.ready = Ready(300, 99, 100, 4, 0.0)
        prompts = CanaryPrompts(tmp_path, [], [CanaryPrompt("one", (1, 2, 3, 4), 5)])
        task = asyncio.create_task(CanaryWatch(prompts, 1.0, 0, client, metrics)._run_once())
        message = await client._outgoing.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client._outgoing.get_nowait() == Abort(message.request_id)
        return message

    message = asyncio.run(sent())
    params = params_of(message.params)
    assert (message.canary, message.stream, message.prompt_ids) == (True, False, [1, 2, 3, 4])
    assert (params.temperature, params.max_tokens, params.seed, params.priority) == (0, 5, 0, 2**31 - 1)
    with pytest.raises(InvalidParameterError):
        SamplingParams(priority=params.priority + 1)
    assert params.cache_salt is not None
    assert params.cache_salt.startswith("canary ")


def test_neighbours_that_take_seats_pages_and_drafts_make_no_fault(
    folder: Path, llm: LLM, tmp_path: Path, py_rng: random.Random, soak: bool
) -> None:
    """A pool for little more than one long sequence, and no drafts beside more than one neighbour."""
    texts = [f"{name} of the canary's prompts, of some pages" for name in ("one", "another")]
    kept = []
    for text in texts:
        output = llm.generate(text, SamplingParams(temperature=0, max_tokens=20))[0]
        counts = ("num_rounds", "num_drafted", "num_accepted")
        expected = {"token_ids": output.token_ids} | {name: getattr(output.rounds, name) for name in counts}
        kept.append({"name": text[:3], "max_tokens": 20, "prompt": text, "expected": expected})
    path = tmp_path / "kept.jsonl"
    path.write_text("\n".join(map(json.dumps, kept)))
    sizes = ("--max-seats", "6", "--max-tokens-per-step", "32", "--kv-cache-bytes", "900000")
    bodies = [
        {"model": "tiny", "prompt": "y" * py_rng.choice([3, 60, 150]), "max_tokens": py_rng.choice([5, 60, 90])}
        for _ in range(800 if soak else 24)
    ]
    canary = ("--canary", "0.01", "--canary-prompts", str(path), "--max-speculating-rows", "2")
    with serve_model(folder, *sizes, *canary) as server:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda body: server.post("/v1/completions", body | {"ignore_eos": True}), bodies))
        assert {answer.status for answer in answers} == {200}
        wait_for_runs(server, canary_of(server)["num_runs"] + 2)
        shown, stats = samples(server), server.get("/v1/stats").json
        said = end(server)
    assert shown["canary_failures_total cold"] == shown["canary_failures_total prefix_hit"] == 0
    assert shown["canary_runs_total cold"] > 0 < shown["canary_runs_total prefix_hit"]
    assert stats["preemptions"] > 0
    # What neighbours took was noticed.
    assert any("is not compared in full" in text for text in said)
