"""The server as someone at a terminal uses it: with curl."""

import json
import shutil
import subprocess

import pytest

from tests.python.serve.server_process import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}


def curl(server: ServerProcess, path: str, *arguments: str) -> str:
    url = f"http://127.0.0.1:{server.port}{path}"
    run = subprocess.run(["curl", "-sS", "--max-time", "60", url, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


def as_json(body: object) -> list[str]:
    return ["-H", "content-type: application/json", "-d", json.dumps(body)]


def test_the_models_are_listed(server: ServerProcess) -> None:
    listed = json.loads(curl(server, "/v1/models"))
    assert [model["id"] for model in listed["data"]] == ["tiny"]


def test_a_chat_streams_event_by_event(server: ServerProcess) -> None:
    question = QUESTION | {"temperature": 0, "thinking_mode": "disabled"}
    answer = json.loads(curl(server, "/v1/chat/completions", *as_json(question)))
    stream = curl(server, "/v1/chat/completions", "-N", *as_json(question | {"stream": True}))
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == answer["choices"][0]["message"]["content"] != ""
    assert answer["usage"]["completion_tokens"] == 6


def test_what_is_wrong_with_a_body_is_said(server: ServerProcess) -> None:
    shown = ["-w", "\n%{http_code} %{content_type}"]
    for body, status, param in [
        (QUESTION | {"max_token": 3}, 400, "max_token"),
        (QUESTION | {"model": "other"}, 404, "model"),
        (QUESTION | {"messages": []}, 400, "messages"),
    ]:
        text, _, code = curl(server, "/v1/chat/completions", *shown, *as_json(body)).rpartition("\n")
        assert code == f"{status} application/json"
        assert json.loads(text)["error"]["param"] == param
    text, _, code = curl(server, "/v1/chat/completions", *shown, "-d", "{").rpartition("\n")
    assert code == "400 application/json"  # curl's own content-type is that of a form
    assert "content-type" in json.loads(text)["error"]["message"]
