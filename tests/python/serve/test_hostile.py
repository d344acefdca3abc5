"""Bad requests get an error that names the field, and the next good request is answered as if nothing had been."""

import json
import re
import socket
from collections.abc import Iterator

import pytest

from tandem import LLM, SamplingParams
from tests.python.serve import hostile
from tests.python.serve.conftest import MAX_BODY_BYTES
from tests.python.serve.server_process import ServerProcess

pytestmark = pytest.mark.slow

GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def right(llm: LLM) -> str:
    return llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].text


@pytest.fixture(autouse=True)
def the_server_is_unharmed(server: ServerProcess, right: str) -> Iterator[None]:
    yield
    assert server.post("/v1/completions", GOOD).json["choices"][0]["text"] == right
    assert server.get("/health").status == 200


BODIES = hostile.bodies()


def test_there_are_enough_hostile_bodies() -> None:
    assert len({body for _, _, body, _, _ in BODIES}) == len(BODIES) >= 60


@pytest.mark.parametrize(("path", "body", "status", "field"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES])
def test_a_hostile_body_is_refused(
    server: ServerProcess, path: str, body: bytes, status: int, field: str | None
) -> None:
    answer = server.post(path, body)
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    # What was given is repeated, but not without bound.
    assert len(answer.body) < 4000
    if field is not None:
        assert error["param"] is not None
        shown = re.match(r"(\w+)=", error["message"])
        assert shown is None or shown[1] in (field, "n"), error
        assert error["param"].split(".")[0] in (field, f"{field} ") or error["param"] == "n", error


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(server: ServerProcess, kind: str) -> None:
    answer = server.post("/v1/completions", GOOD, {"content-type": kind})
    assert answer.status == 400
    assert "content-type" in answer.json["error"]["message"]


def test_unknown_paths_and_methods_get_json(server: ServerProcess) -> None:
    assert server.get("/v1/nothing").json["error"]["type"] == "not_found_error"
    answer = server.get("/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "does not take GET" in answer.json["error"]["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def raw(server: ServerProcess, data: bytes, *, shut: bool = False, until: bytes = b"\0") -> bytes:
    """What comes back for some bytes, up to the end of the connection or of what is waited for."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while not received.endswith(until) and (part := connection.recv(65536)):
                received += part
        except ConnectionResetError:
            return received
        return received


def test_a_body_that_turns_out_too_long_is_refused_though_no_length_was_given(server: ServerProcess) -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    answer = raw(server, head + chunk * (MAX_BODY_BYTES // 0x1000 + 2), until=b"}}")
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_declared_length_is_refused_before_the_body_comes(server: ServerProcess) -> None:
    head = HEAD + b"content-length: 999999999\r\n\r\n"
    assert raw(server, head, until=b"}}").startswith(b"HTTP/1.1 413")


def test_a_head_without_end_is_refused(server: ServerProcess) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\n" + b"x-filler: " + b"y" * 200_000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("data", [b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"POST\r\n\r\n"])
def test_what_is_not_http_is_refused(server: ServerProcess, data: bytes) -> None:
    assert raw(server, data, shut=True).startswith(b"HTTP/1.1 400")


def test_two_requests_with_the_same_id_get_their_own_answers(server: ServerProcess, right: str) -> None:
    body = json.dumps(GOOD).encode()
    head = HEAD + f"x-request-id: 1\r\ncontent-length: {len(body)}\r\n".encode()
    answers = raw(server, head + b"\r\n" + body + head + b"connection: close\r\n\r\n" + body)
    starts = [i for i in range(len(answers)) if answers.startswith(b'{"id"', i)]
    texts = [json.JSONDecoder().raw_decode(answers[i:].decode())[0]["choices"][0]["text"] for i in starts]
    assert texts == [right, right]
    ids = {part.split(b'"')[0] for part in answers.split(b'"id":"')[1:]}
    assert len(ids) == 2


def test_numbers_in_answers_are_json_where_a_logprob_is_minus_infinity(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", GOOD | {"logprobs": 20, "top_k": 1, "max_tokens": 2})
    logprobs = json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(logprobs["choices"][0]["logprobs"]["token_logprobs"]) == 2
