"""Bodies that are right but for a few random places are answered or refused by name; never is the server at fault."""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tests.python.serve.server_process import ServerProcess

pytestmark = pytest.mark.slow

_NUMBERS = [0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]
_TEXTS = ["", "x", "\0", "\U0001f600", "</mm:think>", "]~b]ai\n", "null", "1"]
_LISTS = [[], [None], [[]], [{}], ["x"] * 3, [0], [299], [1, 2, 3]]
_OBJECTS = [{}, {"a": 1}, {"70": 1}, {"type": "text"}, {"type": "json_object"}, {"type": "regex", "source": "[a-c]+"}]
ODD: list[Any] = [None, True, False, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS]

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": [1]}}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
_CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}],
    "chat_template_kwargs": {"shout": True},
    "thinking_mode": "disabled",
}
_SAMPLING: dict[str, Any] = {
    "n": 1,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"70": 1},
    "seed": 1,
    "stop": ["q"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 1,
    "priority": 1,
    "cache_salt": "s",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
    "grammar": {"type": "regex", "source": "[ab]+"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": _SAMPLING | {"prompt": "hello", "echo": False, "logprobs": 1},
    "/v1/chat/completions": _SAMPLING | _CONVERSATION | {"logprobs": True, "top_logprobs": 1, "tool_choice": "auto"},
    "/tokenize": _CONVERSATION | {"add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": True},
}
# Pairs of which only one may be given; the second of the others needs the first.
_EXCLUSIVE = (("grammar", "response_format"), ("tools", "grammar"), ("tools", "response_format"))
_NEEDED = (("stream", "stream_options"), ("logprobs", "top_logprobs"), ("tools", "tool_choice"))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def mutated(path: str, rng: random.Random) -> dict[str, Any]:
    """A body with some of its fields, changed at up to two places."""
    body = copy.deepcopy(BODIES[path])
    optional = [name for name in body if name not in ("prompt", "messages", "tokens")]
    for name in rng.sample(optional, rng.randrange(len(optional))):
        del body[name]
    for pair in _EXCLUSIVE:
        if all(name in body for name in pair):
            del body[rng.choice(pair)]
    for needed, name in _NEEDED:
        if needed not in body:
            body.pop(name, None)
    body["model"] = "tiny"
    for _ in range(rng.randrange(3)):
        *way, last = rng.choice(list(places(body)))
        holder: Any = body
        for key in way:
            holder = holder[key]
        match rng.randrange(8):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(["extra", "type", "name", "strict"])] = copy.deepcopy(rng.choice(ODD))
            case _:
                holder[last] = copy.deepcopy(rng.choice(ODD))
    return body


def send(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[str, int]:
    answer = server.post(path, body)
    shown = (json.dumps(body), answer.status, answer.body[-500:])
    assert answer.status in (200, 400, 404), shown
    if answer.status != 200:
        assert answer.json["error"]["param"], shown
    elif body.get("stream"):
        assert answer.body.endswith(b"data: [DONE]\n\n"), shown
    else:
        assert "error" not in answer.json, shown
    return path, answer.status


def test_mutated_bodies_are_answered_or_refused_by_name_and_harm_no_neighbour(
    server: ServerProcess, llm: LLM, py_rng: random.Random, soak: bool
) -> None:
    good = {"max_tokens": 20, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    right = llm.generate("hello", SamplingParams(**good))[0].text

    def check_neighbour() -> None:
        answer = server.post("/v1/completions", good | {"model": "tiny", "prompt": "hello"})
        assert answer.json["choices"][0]["text"] == right

    futures, neighbours = [], []
    with ThreadPoolExecutor(8) as threads:
        for i in range(5000 if soak else 250):
            path = py_rng.choice(list(BODIES))
            futures.append(threads.submit(send, server, path, mutated(path, py_rng)))
            if i % 10 == 0:
                neighbours.append(threads.submit(check_neighbour))
    counts = Counter(future.result() for future in futures)
    for future in neighbours:
        future.result()
    print(counts)
    assert all(counts[path, status] > 5 for path in BODIES for status in (200, 400))
