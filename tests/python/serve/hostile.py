"""Requests that a server must refuse without harm: (name, path, body, status, field at fault)."""

import json
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_TEXT: dict[str, Any] = {"model": "tiny", "prompt": "x"}
_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def _strict(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool whose calls must follow its schema."""
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]


# Values of one field of a completion.
_FIELD_VALUES: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("temperature", 1e308),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", 10**4000),
    ("min_p", -0.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e300),
    ("repetition_penalty", 1e-300),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("n", 0),
    ("n", -1),
    ("n", 13),
    ("n", 10**30),
    ("n", "2"),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 2**40),
    ("max_tokens", 1.5),
    ("min_tokens", 17),
    ("seed", "7"),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 300),
    ("stop", {"a": "b"}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [300]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"300": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"70": 101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", [1]),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("priority", 2**40),
    ("cache_salt", ""),
    ("cache_salt", "x" * 1000),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("echo", 1),
    ("best_of", 2),
    ("suffix", "x"),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 3}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "x" * 20_000}}}),
    ("grammar", {"type": "regex", "source": ""}),
    ("grammar", {"type": "regex", "source": "("}),
    ("grammar", {"type": "grammar", "source": "start: nothing"}),
    ("grammar", {"type": "regex", "source": "((a{1000}){1000}){1000}"}),
    ("grammar", {"type": "regex", "source": "(" * 20_000}),
    ("grammar", {"type": "grammar", "source": 'start: "a" start'}),
    ("grammar", "[a-z]+"),
    ("model", None),
    ("model", 3),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [[1], "x", 3]),
    ("prompt", [1, -1]),
    ("prompt", [1, 300]),
    ("prompt", [2**31]),
    ("prompt", [10**40]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", {"text": "x"}),
    ("prompt", None),
    ("prompt", "x" * 256),
    ("prompt", ["x"] * 13),
]

_CHAT_VALUES: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "king", "content": "x"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
    ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
    ("messages", [{"role": "user", "content": "x" * 300}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}]),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "no spaces allowed"}}]),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("tool_choice", "any"),
    ("tool_choice", 1),
    ("tool_choice", {}),
    ("tool_choice", {"mode": "required"}),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", {"type": "function", "name": "f"}),
    ("tool_choice", {"type": "function", "function": {"name": 1}}),
    ("tool_choice", {"type": "function", "function": {"name": "f", "strict": True}}),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tools", _strict({"type": "array"})),
    ("tools", _strict({"type": "object", "properties": 3})),
    ("tools", _strict({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}})),
    ("tools", _strict({"type": "object", "properties": {"a": {"pattern": "(" * 1000, "type": "string"}}})),
    ("tools", _strict({"type": "object", "properties": {"a": {"type": "object", "required": {}}}})),
    ("tools", _strict({"type": "object", "properties": {"x" * 300: {}}})),
    ("tools", _strict({"type": "object", "properties": {"a": {"enum": [{}, "x"]}}})),
    ("parallel_tool_calls", True),
    ("parallel_tool_calls", "no"),
    ("parallel_tool_calls", False),
    ("logprobs", 1),
    ("top_logprobs", 2),
    ("max_completion_tokens", 0),
    ("max_tokens", 0),
    ("thinking_mode", "loud"),
    ("reasoning_effort", "high"),
    ("chat_template_kwargs", {"y" * 20_000: 1}),
]


def _nested(depth: int) -> bytes:
    return b'{"model":"tiny","prompt":' + b"[" * depth + b"]" * depth + b"}"


_RAW: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("half an object", b'{"model": "tiny", "pro'),
    ("an array", b"[]"),
    ("null", b"null"),
    ("a number", b"1"),
    ("not UTF-8", b'{"model": "tiny", "prompt": "\xff\xfe"}'),
    ("half a surrogate pair", b'{"model": "tiny", "prompt": "\\ud800"}'),
    ("NaN", b'{"model": "tiny", "prompt": "x", "temperature": NaN}'),
    ("Infinity", b'{"model": "tiny", "prompt": "x", "temperature": Infinity}'),
    ("a number past all bounds", b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'),
    ("nested too deep", _nested(10_000)),
    ("text behind the object", json.dumps(_TEXT).encode() + b" trailing"),
    ("two objects", json.dumps(_TEXT).encode() * 2),
]

Hostile = tuple[str, str, bytes, int, str | None]


def bodies() -> list[Hostile]:
    found: list[Hostile] = [(name, COMPLETIONS, body, 400, None) for name, body in _RAW]
    for name, value in _FIELD_VALUES:
        shown = json.dumps(value)
        found.append((f"{name}={shown[:40]}", COMPLETIONS, json.dumps(_TEXT | {name: value}).encode(), 400, name))
    for name, value in _CHAT_VALUES:
        shown = json.dumps(value)
        found.append((f"chat {name}={shown[:40]}", CHAT, json.dumps(_CHAT | {name: value}).encode(), 400, name))
    body = _CHAT | {"logprobs": True, "top_logprobs": 21}
    found.append(("chat top_logprobs=21", CHAT, json.dumps(body).encode(), 400, "top_logprobs"))
    found.append(("a long model", COMPLETIONS, json.dumps(_TEXT | {"model": "m" * 20_000}).encode(), 404, "model"))
    found.append(("a long field", COMPLETIONS, json.dumps(_TEXT | {"k" * 20_000: 1}).encode(), 400, "k" * 500))
    found.append(("another model", COMPLETIONS, json.dumps(_TEXT | {"model": "gpt"}).encode(), 404, "model"))
    found.append(("no prompt", COMPLETIONS, b'{"model": "tiny"}', 400, "prompt"))
    found.append(("too long a body", COMPLETIONS, json.dumps(_TEXT | {"prompt": "x" * 60_000}).encode(), 413, None))
    return found
