"""The table of what the server supports: each row is tried on a server, and the README shows exactly these rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.python.serve.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow

BEGIN, END = "<!-- conformance: begin -->\n", "<!-- conformance: end -->\n"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hello"},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
}


def _tools_of(parameters: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]


_TOOLS = _tools_of({"type": "object"})


@dataclass(frozen=True)
class Row:
    """``check`` fails where ``support`` is not what the server does."""

    feature: str
    support: str
    check: Callable[[ServerProcess], None]


def post(server: ServerProcess, path: str, **fields: Any) -> Any:
    common = {"model": "tiny", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return server.post(path, _BODIES[path] | common | fields)


def taken(*paths: str, **fields: Any) -> Callable[[ServerProcess], None]:
    """The fields are taken, streamed and not."""

    def check(server: ServerProcess) -> None:
        for path in paths:
            answer = post(server, path, **fields)
            assert answer.status == 200, answer.body
            assert post(server, path, **fields, stream=True).body.endswith(b"data: [DONE]\n\n")

    return check


def refused(*paths: str, **fields: Any) -> Callable[[ServerProcess], None]:
    """Each of the fields alone gets a 400 that names it."""

    def check(server: ServerProcess) -> None:
        for path in paths:
            for name, value in fields.items():
                answer = post(server, path, **{name: value})
                assert answer.status == 400, (name, answer.body)
                assert answer.json["error"]["param"].split(".")[0] == name

    return check


def answers(method: str, path: str, body: Any = None) -> Callable[[ServerProcess], None]:
    def check(server: ServerProcess) -> None:
        answer = server.get(path) if method == "GET" else server.post(path, body)
        assert answer.status == 200, answer.body

    return check


def all_of(*checks: Callable[[ServerProcess], None]) -> Callable[[ServerProcess], None]:
    def check(server: ServerProcess) -> None:
        for each in checks:
            each(server)

    return check


def usage_on_request(server: ServerProcess) -> None:
    events = server.events(TEXT, {"model": "tiny", "prompt": "x", "stream_options": {"include_usage": True}})
    assert events[-2]["usage"]["completion_tokens"] > 0


def gives_cached_tokens(server: ServerProcess) -> None:
    assert "cached_tokens" in post(server, TEXT).json["usage"]["prompt_tokens_details"]


def gives_reasoning(server: ServerProcess) -> None:
    message = post(server, CHAT, thinking_mode="enabled").json["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""


def stops_in_reasoning(server: ServerProcess) -> None:
    whole = post(server, CHAT, thinking_mode="enabled").json["choices"][0]["message"]["reasoning_content"]
    choice = post(server, CHAT, thinking_mode="enabled", stop=whole[-1]).json["choices"][0]
    assert choice["message"]["reasoning_content"] == whole.partition(whole[-1])[0] or None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[-1])


ROWS = [
    Row("`POST /v1/chat/completions`, `POST /v1/completions`", "yes, with `stream`", taken(TEXT, CHAT)),
    Row(
        "`GET /v1/models`, `GET /v1/models/{name}`",
        "yes",
        all_of(*(answers("GET", p) for p in ("/v1/models", "/v1/models/tiny"))),
    ),
    Row(
        "`POST /tokenize` (text or conversation), `POST /detokenize`",
        "yes",
        all_of(
            answers("POST", "/tokenize", {"prompt": "x"}),
            answers("POST", "/tokenize", _BODIES[CHAT] | {"model": "tiny"}),
            answers("POST", "/detokenize", {"tokens": [9]}),
        ),
    ),
    Row(
        "`GET /health` (readiness), `/live`, `/metrics`, `/v1/stats`",
        "yes",
        all_of(*(answers("GET", p) for p in ("/health", "/live", "/metrics", "/v1/stats"))),
    ),
    Row(
        "`prompt` as text, ids, or a list of either",
        "yes",
        all_of(*(taken(TEXT, prompt=p) for p in ("x", [9], ["x", "y"], [[9], [10]]))),
    ),
    Row("`n`, `seed` (choice i has seed + i)", "yes", taken(TEXT, CHAT, n=2, seed=1)),
    Row(
        "`max_tokens`; in chat also `max_completion_tokens`",
        "yes",
        all_of(taken(TEXT, CHAT), taken(CHAT, max_completion_tokens=3)),
    ),
    Row(
        "`temperature`, `top_p`, `top_k`, `min_p`",
        "yes",
        taken(TEXT, CHAT, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1),
    ),
    Row(
        "`presence_penalty`, `frequency_penalty`, `repetition_penalty`",
        "yes",
        taken(TEXT, CHAT, presence_penalty=1, frequency_penalty=1, repetition_penalty=1.1),
    ),
    Row(
        "`logit_bias`, `min_tokens`, `ignore_eos`, `skip_special_tokens`",
        "yes",
        taken(TEXT, CHAT, logit_bias={"9": 5}, min_tokens=1, skip_special_tokens=False),
    ),
    Row(
        "`stop` (up to 16), `stop_token_ids`, `include_stop_str_in_output`",
        "yes; `stop` is looked for in the reasoning too",
        all_of(
            taken(TEXT, CHAT, stop=["zz"] * 16, stop_token_ids=[2], include_stop_str_in_output=True),
            stops_in_reasoning,
        ),
    ),
    Row(
        "`logprobs`; in chat with `top_logprobs` (up to 20)",
        "yes",
        all_of(taken(TEXT, logprobs=20), taken(CHAT, logprobs=True, top_logprobs=20)),
    ),
    Row(
        "`echo`, with `max_tokens` 0 too, and with `logprobs`",
        "yes; not echo, logprobs and stream together",
        all_of(
            taken(TEXT, echo=True, max_tokens=0),
            lambda s: _equal(post(s, TEXT, echo=True, logprobs=1).status, 200),
            lambda s: _equal(post(s, TEXT, echo=True, logprobs=1, stream=True).status, 400),
        ),
    ),
    Row("`stream_options.include_usage`", "yes", usage_on_request),
    Row("`usage.prompt_tokens_details.cached_tokens`", "yes", gives_cached_tokens),
    Row("`cache_salt`, `priority`", "yes", taken(TEXT, CHAT, cache_salt="mine", priority=1)),
    Row(
        "`thinking_mode`, `chat_template_kwargs`",
        "yes",
        all_of(taken(CHAT, thinking_mode="disabled"), taken(CHAT, chat_template_kwargs={"thinking_mode": "adaptive"})),
    ),
    Row("`reasoning_content` beside `content`", "yes", gives_reasoning),
    Row(
        "`tools`, `tool_choice` none or auto, parallel calls",
        "yes, where the model's chat template takes tools",
        taken(CHAT, tools=_TOOLS, tool_choice="auto", parallel_tool_calls=True),
    ),
    Row(
        "`tool_choice` required or a named tool, `strict` tools, `parallel_tool_calls` false",
        "yes, where the vocabulary has M3's namespace token; a schema that cannot be followed is refused",
        all_of(
            taken(CHAT, tools=_TOOLS, tool_choice="required"),
            taken(CHAT, tools=_TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}),
            taken(CHAT, tools=_tools_of({"type": "object"}, strict=True)),
            taken(CHAT, tools=_TOOLS, parallel_tool_calls=False),
            refused(CHAT, tools=_tools_of({"type": "object", "minProperties": 1}, strict=True)),
        ),
    ),
    Row(
        "`response_format` json_object and json_schema; `grammar` (regex, Lark, GBNF)",
        "yes; behind the reasoning; not together with tools",
        all_of(
            taken(TEXT, CHAT, response_format={"type": "json_object"}),
            taken(TEXT, CHAT, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}),
            taken(TEXT, CHAT, grammar={"type": "regex", "source": "[0-9]+"}),
            lambda server: _equal(
                post(server, CHAT, tools=_TOOLS, response_format={"type": "json_object"}).status, 400
            ),
        ),
    ),
    Row(
        "images and other content that is not text",
        "refused",
        refused(CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    ),
    Row(
        "`user`, `metadata`, `store`, `service_tier`, `safety_identifier`, `prompt_cache_key`",
        "taken, without effect",
        taken(
            TEXT,
            CHAT,
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            safety_identifier="s",
            prompt_cache_key="k",
        ),
    ),
    Row(
        "any other field",
        "refused",
        refused(TEXT, CHAT, best_of=1, suffix="x", functions=[], modalities=["text"], anything=1),
    ),
]


def _equal(given: object, expected: object) -> None:
    assert given == expected


@pytest.mark.parametrize("row", ROWS, ids=[row.feature for row in ROWS])
def test_a_row_of_the_table_holds(server: ServerProcess, row: Row) -> None:
    row.check(server)


def test_the_readme_shows_exactly_these_rows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = "| feature | supported |\n| --- | --- |\n"
    table += "".join(f"| {row.feature} | {row.support} |\n" for row in ROWS)
    shown = readme.partition(BEGIN)[2].partition(END)[0]
    assert shown == table, f"README.md should have between its marks:\n{table}"
