"""Heavy and careless traffic: full queues, deadlines, clients that go, and clients that do not read."""

import contextlib
import json
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AuthenticationError, RateLimitError
from prometheus_client.parser import text_string_to_metric_families

from tandem import LLM, SamplingParams
from tests.python.serve.server_process import Answer, ServerProcess, serve_scripted

pytestmark = pytest.mark.slow

SCRIPTED = {"model": "scripted", "prompt": "x"}
KEY = {"authorization": "Bearer second key"}
TIMEOUT_S = 2.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
BEGUN = b"GET /live HTTP/1.1\r\nx-slow: "


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with keys, room for three generations, little time, and an engine of 100 tokens a second."""
    folder = tmp_path_factory.mktemp("guarded")
    options: dict[str, Any] = {"api_keys": ["first key", "second key"], "max_requests": 3}
    options |= {"request_timeout_s": TIMEOUT_S, "head_timeout_s": 1.0}
    with serve_scripted(folder, "--interval", "0.01", **options) as server:
        yield server


def stats(server: ServerProcess, **headers: str) -> dict[str, Any]:
    answer = server.get("/v1/stats", headers)
    assert answer.status == 200, answer.body
    return dict(answer.json)


def refusals(server: ServerProcess, status: int) -> float:
    """How many requests ``/metrics`` counts as refused with a status."""
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name == "tandem:requests_refused_total" and sample.labels["code"] == str(status):
                return sample.value
    return 0


def open_stream(server: ServerProcess, body: dict[str, Any], **headers: str) -> socket.socket:
    """A connection on which a streamed completion was asked for."""
    data = json.dumps({"stream": True} | body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    return connection


def test_keys_are_asked_for_except_by_probes(guarded: ServerProcess) -> None:
    refused = refusals(guarded, 401)
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "second key"},
        {"authorization": "Bearer "},
    ):
        answer = guarded.post("/v1/completions", SCRIPTED, headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert guarded.get("/v1/stats", headers).status == 401
    assert refusals(guarded, 401) == refused + 8
    assert guarded.get("/health").status == guarded.get("/live").status == 200
    assert guarded.post("/v1/completions", SCRIPTED, KEY).status == 200
    with pytest.raises(AuthenticationError):
        guarded.client(api_key="wrong").models.list()
    assert [model.id for model in guarded.client(api_key="first key").models.list()] == ["scripted"]


def test_a_full_queue_answers_429_and_takes_requests_again_when_there_is_room(guarded: ServerProcess) -> None:
    running = [open_stream(guarded, SCRIPTED | {"max_tokens": 4000}, **KEY) for _ in range(3)]
    guarded.wait_until(lambda: stats(guarded, **KEY)["running"] == 3, 10)
    refused = guarded.post("/v1/completions", SCRIPTED, KEY)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert "at most 3" in refused.json["error"]["message"]
    with pytest.raises(RateLimitError):
        guarded.client(api_key="first key").completions.create(model="scripted", prompt="x")
    for connection in running:
        connection.close()
    guarded.wait_until(lambda: guarded.post("/v1/completions", SCRIPTED, KEY).status == 200, 10)


def test_a_request_that_takes_too_long_is_aborted(guarded: ServerProcess) -> None:
    start = time.monotonic()
    answer = guarded.post("/v1/completions", SCRIPTED | {"max_tokens": 4000}, KEY)
    assert time.monotonic() - start >= TIMEOUT_S
    assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
    stream = guarded.client(api_key="first key").completions.create(
        model="scripted", prompt="x", max_tokens=4000, stream=True
    )
    pieces: list[str] = []
    with pytest.raises(APIError, match="longer than the server allows"):
        pieces.extend(chunk.choices[0].text for chunk in stream)
    assert pieces
    guarded.wait_until(lambda: stats(guarded, **KEY)["running"] == 0, 10)


@pytest.mark.parametrize(("head", "num_before"), [(b"", 0), (BEGUN, 0), (BEGUN, 1)])
def test_a_head_that_never_ends_is_not_waited_for(guarded: ServerProcess, head: bytes, num_before: int) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as connection:
        for _ in range(num_before):
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += connection.recv(4096)
        connection.sendall(head)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(4096) == b""


def test_a_client_that_goes_before_its_body_has_come_is_no_fault(tmp_path: Path) -> None:
    with serve_scripted(tmp_path) as server:
        for sent in (HEAD, HEAD + b"{"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(sent)
        server.wait_until(lambda: refusals(server, 400) == 2, 10)
        server.signal(signal.SIGTERM)
        assert "Traceback" not in server.wait(20)[1]


def test_a_failed_generation_ends_its_stream_with_an_error_and_harms_no_neighbour(guarded: ServerProcess) -> None:
    with ThreadPoolExecutor() as pool:
        good = pool.submit(guarded.post, "/v1/completions", SCRIPTED | {"max_tokens": 20}, KEY)
        whole = guarded.post("/v1/completions", SCRIPTED | {"prompt": "fail_after=0"}, KEY)
        assert (whole.status, whole.json["error"]["code"]) == (500, "generation_failed")
        assert "the script says so" in whole.json["error"]["message"]
        streamed = guarded.post("/v1/completions", SCRIPTED | {"prompt": "fail_after=2", "stream": True}, KEY)
        assert streamed.status == 200
        events = [json.loads(part.removeprefix(b"data: ")) for part in streamed.body.split(b"\n\n") if part]
        assert events[-1]["error"]["code"] == "generation_failed"
        assert b"[DONE]" not in streamed.body
        assert good.result().status == 200, good.result().body
        assert good.result().json["usage"]["completion_tokens"] == 20


def test_a_client_that_does_not_read_is_cut_off_and_its_request_aborted(tmp_path: Path) -> None:
    # 4 kB a token, 8 MB a second, 16 MB in all: more than the buffers of both sockets hold.
    with serve_scripted(tmp_path, "--tokens-per-round", "20", "--interval", "0.01", send_timeout_s=0.3) as server:
        before = resident_bytes(server.pid)
        connection = open_stream(server, SCRIPTED | {"prompt": "word=" + "x" * 4000, "max_tokens": 4095 - 5})
        server.wait_until(lambda: stats(server)["finished"]["abort"] == 1, 20)
        assert stats(server)["running"] == 0
        assert resident_bytes(server.pid) - before < 40 * 2**20
        with connection:
            received = b"".join(iter(lambda: connection.recv(2**20), b""))
        assert b"[DONE]" not in received
        assert len(received) < 16_000_000
        assert server.post("/v1/completions", SCRIPTED | {"max_tokens": 3}).status == 200


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def memory_of(server: ServerProcess) -> int:
    """Bytes that both processes have resident."""
    return resident_bytes(server.pid) + resident_bytes(server.engine_pid)


# With a real model, whose pages must come back.

GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def clean(server: ServerProcess, llm: LLM) -> Iterator[None]:
    """Afterwards nothing runs, no page is held, and the next answer is right."""
    yield
    answers: list[Answer] = []

    def idle() -> bool:
        """A request whose client has gone may still be on its way to the engine, so all is asked at once."""
        now = stats(server)
        pages = now["pages"]
        assert pages["free"] + pages["cached"] + pages["held"] + pages["leased"] == pages["total"]
        return now["running"] == now["waiting"] == pages["held"] == pages["leased"] == 0

    def answered() -> bool:
        answers.append(server.post("/v1/completions", GOOD))
        assert answers[-1].status in (200, 429), answers[-1].body
        return answers[-1].status == 200

    server.wait_until(answered, 30)
    expected = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].text
    assert answers[-1].json["choices"][0]["text"] == expected
    server.wait_until(idle, 30)


def reset(connection: socket.socket) -> None:
    """Close without the usual farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.usefixtures("clean")
def test_a_stream_may_be_cut_at_any_byte(server: ServerProcess, soak: bool) -> None:
    body = GOOD | {"max_tokens": 3}
    with open_stream(server, body, connection="close") as connection:
        whole = b"".join(iter(lambda: connection.recv(65536), b""))
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    def cut(length: int) -> None:
        connection = open_stream(server, body)
        received = 0
        while received < length and (part := connection.recv(length - received)):
            received += len(part)
        (reset if length % 2 else socket.socket.close)(connection)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cut, range(0, len(whole), 1 if soak else 29)))


def cancel(server: ServerProcess, bodies: list[dict[str, Any]], longest_s: float, rng: random.Random) -> None:
    """Send requests from eight clients, and close each connection at a random time, abruptly or not."""

    def run(plan: tuple[dict[str, Any], float, bool, bool]) -> None:
        body, wait_s, stream, abruptly = plan
        connection = open_stream(server, body | {"stream": stream})
        time.sleep(wait_s)
        (reset if abruptly else socket.socket.close)(connection)

    plans = [(body, rng.random() * longest_s, rng.random() < 0.5, rng.random() < 0.5) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, plans))
    server.wait_until(lambda: not (now := stats(server))["running"] and not now["waiting"], 60)


@pytest.mark.usefixtures("clean")
def test_requests_cancelled_at_random_points_leave_nothing_behind(
    server: ServerProcess, py_rng: random.Random, soak: bool
) -> None:
    count = 500 if soak else 60
    bodies = [
        GOOD | {"prompt": "y" * py_rng.choice([1, 7, 40, 150]), "max_tokens": 100, "temperature": i % 2}
        for i in range(count)
    ]
    before = stats(server)["finished"]["abort"]
    cancel(server, bodies[: count // 2], 0.15, py_rng)
    memory = memory_of(server)
    cancel(server, bodies[count // 2 :], 0.15, py_rng)
    assert stats(server)["finished"]["abort"] - before > count // 2
    if soak:
        assert memory_of(server) - memory < 4 * 2**20


@pytest.mark.usefixtures("clean")
def test_half_a_request_and_silence_costs_nothing(server: ServerProcess) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for i, connection in enumerate(connections):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"[: 20 + 3 * i])
    assert server.post("/v1/completions", GOOD).status == 200
    for connection in connections:
        connection.close()
