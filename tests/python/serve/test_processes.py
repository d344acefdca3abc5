"""The two processes: each sees the other's end, health tells the truth, and signals end both in order."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.python.serve.server_process import Answer, ServerProcess, process_exists, serve_scripted
from tests.python.serve.test_traffic import HEAD, open_stream

pytestmark = pytest.mark.slow

SOON_S = 1.0
GOOD = {"model": "scripted", "prompt": "x", "max_tokens": 3}


def in_background(server: ServerProcess, body: dict[str, object]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    return thread, answers


def num_running(server: ServerProcess) -> int:
    return int(server.get("/v1/stats").json["running"])


def test_a_completion_streams_through_both_processes(tmp_path: Path) -> None:
    with serve_scripted(tmp_path) as server:
        events = server.events("/v1/completions", GOOD)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abcabcabc"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"


def test_a_killed_engine_fails_what_runs_and_ends_the_server(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.01") as server:
        thread, answers = in_background(server, GOOD | {"max_tokens": 4000})
        server.wait_until(lambda: num_running(server) == 1, 10)
        os.kill(server.engine_pid, signal.SIGKILL)
        start = time.monotonic()
        thread.join()
        assert time.monotonic() - start < SOON_S
        assert answers[0].status == 503
        assert "engine process" in answers[0].json["error"]["message"]
        code, _ = server.wait(10)
        assert code == 3


def test_an_engine_that_dies_in_a_stream_cuts_it_with_an_error(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.01") as server:
        connection = server.connect()
        body = json.dumps(GOOD | {"max_tokens": 4000, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        os.kill(server.engine_pid, signal.SIGKILL)
        data = first + response.read()
        connection.close()
    events = [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]
    assert events[-1]["error"]["type"] == "server_error"
    # What the engine had not sent yet is lost; nothing else is added, and no choice seems to have ended.
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == "abc" * (len(text) // 3) != ""
    assert {event["choices"][0]["finish_reason"] for event in events[:-1]} <= {None}


def test_a_server_whose_engines_thread_has_ended_fails_what_runs_and_ends(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.01") as server:
        answer = server.post("/v1/completions", GOOD | {"prompt": "die_after=2", "max_tokens": 4000})
        assert answer.status == 503
        assert "engine process" in answer.json["error"]["message"]
        code, errors = server.wait(10)
        assert code == 3
        assert "thread has ended" in errors


def test_a_server_that_nobody_reads_sees_its_engine_die(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--load-seconds", "0.5", wait_ready=False) as server:
        server.close_stdout()
        server.wait_until(lambda: server.get("/health").status == 200, 20)
        os.kill(server.engine_pid, signal.SIGKILL)
        code, errors = server.wait(10)
    assert code == 3
    assert "Error" not in errors


def test_an_engine_that_dies_while_it_loads_ends_the_server(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--load-seconds", "60", wait_ready=False) as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        code, errors = server.wait(10)
        assert code != 0
        assert "while it was loading the model" in errors


def half_a_request(server: ServerProcess) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(HEAD + b"{")
    return connection


def test_a_request_that_is_still_coming_does_not_put_off_the_end(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, shutdown_grace_s=20) as server, half_a_request(server) as slow:
        server.wait_until(lambda: server.get("/live").status == 200, 10)
        server.signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: slow.recv(10_000), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in answer
        code, errors = server.wait(10)
    assert code == 0
    assert "Traceback" not in errors


def test_clients_that_do_nothing_do_not_put_off_the_end_of_a_server_whose_engine_died(tmp_path: Path) -> None:
    # 4 kB a token, more than the buffers of both sockets hold.
    unread = GOOD | {"prompt": "word=" + "x" * 4000, "max_tokens": 4000}
    rounds = ("--tokens-per-round", "20", "--interval", "0.01")
    with (
        serve_scripted(tmp_path, *rounds, shutdown_grace_s=60) as server,
        half_a_request(server) as slow,
        open_stream(server, unread),
    ):
        server.wait_until(lambda: server.get("/v1/stats").json["steps"] > 50, 20)
        os.kill(server.engine_pid, signal.SIGKILL)
        start = time.monotonic()
        assert server.wait(10)[0] == 3
        assert time.monotonic() - start < 3 * SOON_S
        assert slow.recv(10_000).startswith(b"HTTP/1.1 503")


def test_the_engine_ends_when_the_http_process_is_killed(tmp_path: Path) -> None:
    with serve_scripted(tmp_path) as server:
        engine = server.engine_pid
        server.signal(signal.SIGKILL)
        server.wait(10)
        assert server.wait_until(lambda: not process_exists(engine), SOON_S) < SOON_S


def test_health_turns_when_the_engine_makes_no_progress_and_back_when_it_does(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, stall_s=0.4) as server:
        thread, answers = in_background(server, GOOD | {"prompt": "stall_after=1 stall_s=1.5"})
        server.wait_until(lambda: server.get("/health").status == 503, 10)
        assert "no progress" in server.get("/health").json["reason"]
        assert server.get("/live").status == 200
        thread.join()
        assert answers[0].status == 200
        assert server.get("/health").status == 200


def test_health_turns_when_the_engine_process_falls_silent(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, stall_s=0.5) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        server.wait_until(lambda: server.get("/health").status == 503, 10)
        assert "not been heard of" in server.get("/health").json["reason"]
        os.kill(engine, signal.SIGCONT)
        server.wait_until(lambda: server.get("/health").status == 200, 10)


def test_statistics_of_a_silent_engine_are_not_waited_for_without_end(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, stall_s=0.5) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        for method in ("GET", "POST"):
            answer = server.request(method, "/v1/stats")
            assert (answer.status, answer.json["error"]["code"]) == (503, "engine_stalled")
        assert server.get("/metrics").status == 200
        os.kill(engine, signal.SIGCONT)
        server.wait_until(lambda: server.get("/v1/stats").status == 200, 10)


def test_an_idle_engine_stays_healthy(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, stall_s=0.3) as server:
        time.sleep(0.7)
        assert server.get("/health").status == 200


def test_while_the_model_is_loaded_the_server_lives_but_is_not_ready(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--load-seconds", "1", wait_ready=False) as server:
        assert server.get("/live").status == 200
        assert server.get("/health").status == 503
        refused = server.post("/v1/completions", GOOD)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        server.wait_until(lambda: server.get("/health").status == 200, 30)
        assert server.post("/v1/completions", GOOD).status == 200


def test_an_engine_that_cannot_be_built_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--refuse-to-load", wait_ready=False) as server:
        code, errors = server.wait(20)
    assert code != 0
    assert "is not a model" in errors


def test_sigterm_lets_running_requests_end_and_takes_no_more(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.05", shutdown_grace_s=20) as server:
        engine = server.engine_pid
        thread, answers = in_background(server, GOOD | {"max_tokens": 20})
        server.wait_until(lambda: num_running(server) == 1, 10)
        # A supervisor may signal every process; ending is the HTTP process's decision all the same.
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(engine, number)
        server.signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status == 200
        assert answers[0].json["usage"]["completion_tokens"] == 20
        assert server.wait(10)[0] == 0
        assert not process_exists(engine)
        with pytest.raises(ConnectionRefusedError):
            server.get("/live")


def test_sigterm_aborts_what_outlasts_the_grace(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.05", shutdown_grace_s=0.3) as server:
        thread, answers = in_background(server, GOOD | {"max_tokens": 4000})
        server.wait_until(lambda: num_running(server) == 1, 10)
        server.signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status == 503
        assert "shutting down" in answers[0].json["error"]["message"]
        assert server.wait(10)[0] == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with serve_scripted(tmp_path, "--interval", "0.05", shutdown_grace_s=100) as server:
        engine = server.engine_pid
        thread, _ = in_background_ignoring_its_end(server)
        server.wait_until(lambda: num_running(server) == 1, 10)
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        assert not server.has_ended()
        server.signal(signal.SIGINT)
        assert server.wait(10)[0] == 0
        thread.join()
        assert not process_exists(engine)


def in_background_ignoring_its_end(server: ServerProcess) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            server.post("/v1/completions", GOOD | {"max_tokens": 4000})
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors
