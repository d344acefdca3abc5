"""Calls that must be made, through a real server that speculates: required, named and strict, streamed or not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from tandem import LLM, SamplingParams
from tandem.engine.tokenizer import NAMESPACE, THINK_CLOSE
from tandem.serve.protocol import ChatBody
from tandem.serve.tool_calls import Reply, ToolCall, parse_reply
from tandem.serve.tool_grammar import call_grammar
from tests.python.serve.conftest import make_served_model
from tests.python.serve.server_process import ServerProcess, serve_model

pytestmark = pytest.mark.slow

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "minLength": 1, "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
            "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 2},
        },
        "required": ["place", "days", "unit"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
USER = {"role": "user", "content": "hi"}
NAMED = {"type": "function", "function": {"name": "weather"}}
PLAIN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 500, "thinking_mode": "disabled"}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for a prompt with tools."""
    path = make_served_model(tmp_path_factory.mktemp("forced") / "tiny")
    config = (path / "config.json").read_text(encoding="utf-8")
    (path / "config.json").write_text(
        config.replace('"max_position_embeddings": 256', '"max_position_embeddings": 2048')
    )
    return path


@pytest.fixture(scope="module")
def speculating(model: Path) -> Iterator[ServerProcess]:
    with serve_model(model, "--max-seats", "8", "--max-tokens-per-step", "64") as server:
        yield server


@pytest.fixture(scope="module")
def client(speculating: ServerProcess) -> OpenAI:
    return speculating.client()


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    """The same model in this process, without a drafter."""
    with LLM(model, drafter=None, num_threads=1) as llm:
        yield llm


def whole(client: OpenAI, **fields: Any) -> tuple[Reply, str]:
    """(reply, finish reason), not streamed."""
    choice = client.chat.completions.create(model="tiny", messages=[USER], extra_body=fields).choices[0]  # type: ignore[list-item]
    message = choice.message
    calls = [ToolCall(made.function.name, made.function.arguments) for made in message.tool_calls or []]  # type: ignore[union-attr]
    reasoning = (message.model_extra or {})["reasoning_content"]
    return Reply(reasoning or "", message.content or "", calls), choice.finish_reason


def streamed(client: OpenAI, **fields: Any) -> tuple[Reply, str]:
    reply, reason = Reply(), ""
    stream = client.chat.completions.create(model="tiny", messages=[USER], stream=True, extra_body=fields)  # type: ignore[list-item]
    for chunk in stream:
        delta = chunk.choices[0].delta
        reply.reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        reply.content += delta.content or ""
        for made in delta.tool_calls or []:
            if made.id is not None:
                assert made.index == len(reply.tool_calls)
                reply.tool_calls.append(ToolCall(made.function.name))
            reply.tool_calls[made.index].arguments += made.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return reply, reason


def without_drafts(server: ServerProcess, llm: LLM, **fields: Any) -> Reply:
    """What the engine says to the same prompt, one token at a time."""
    body = ChatBody.model_validate_json(json.dumps({"model": "tiny", "messages": [USER], **fields}))
    mode = body.thinking_mode or "enabled"
    shown = {"model": "tiny", "messages": [USER], "tools": fields["tools"], "thinking_mode": mode}
    prompt = server.post("/tokenize", shown).json["tokens"]
    params = SamplingParams(
        temperature=fields["temperature"],
        max_tokens=fields["max_tokens"],
        seed=fields["seed"],
        logit_bias={int(token): bias for token, bias in fields.get("logit_bias", {}).items()},
        grammar=call_grammar(body, llm.tokenizer, mode),
    )
    return parse_reply(llm.generate([prompt], params)[0].text, mode, SCHEMAS)


def num_drafted(server: ServerProcess) -> int:
    return sum(sum(route["drafted"]) for route in server.get("/v1/stats").json["rounds"].values())


def assert_valid(reply: Reply) -> None:
    for made in reply.tool_calls:
        jsonschema.validate(json.loads(made.arguments), SCHEMAS[made.name])


@pytest.mark.parametrize(
    ("choice", "more", "reason"),
    [
        ("required", {}, "tool_calls"),
        ("required", {"parallel_tool_calls": False}, "tool_calls"),
        (NAMED, {}, "stop"),
    ],
    ids=["required", "one", "named"],
)
def test_a_forced_choice_is_a_valid_call_and_nothing_else(
    speculating: ServerProcess, client: OpenAI, plain: LLM, choice: Any, more: Any, reason: str
) -> None:
    before = num_drafted(speculating)
    for seed in range(2):
        fields = PLAIN | {"tools": tools(), "tool_choice": choice, "seed": seed} | more
        reply, given = whole(client, **fields)
        assert (given, reply.content, reply.reasoning) == (reason, "", "")
        assert len(reply.tool_calls) == 1 or not (more or choice == NAMED)
        assert reply.tool_calls
        assert_valid(reply)
        if choice == NAMED:
            assert [made.name for made in reply.tool_calls] == ["weather"]
        assert streamed(client, **fields) == (reply, given)
        assert without_drafts(speculating, plain, **fields) == reply
    assert num_drafted(speculating) > before


def test_a_forced_call_comes_behind_the_reasoning(speculating: ServerProcess, client: OpenAI, plain: LLM) -> None:
    close = str(plain.tokenizer.token_id(THINK_CLOSE))
    thoughts = 0
    for seed in range(3):
        fields = PLAIN | {"thinking_mode": "enabled", "tools": tools(), "tool_choice": "required", "seed": seed}
        fields |= {"logit_bias": {close: 4}, "parallel_tool_calls": False}
        reply, reason = whole(client, **fields)
        thoughts += bool(reply.reasoning)
        assert (reason, reply.content) == ("tool_calls", "")
        assert reply.tool_calls
        assert_valid(reply)
        assert streamed(client, **fields) == (reply, reason)
        assert without_drafts(speculating, plain, **fields) == reply
    assert thoughts


def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(
    speculating: ServerProcess, client: OpenAI, plain: LLM
) -> None:
    namespace = str(plain.tokenizer.token_id(NAMESPACE))
    ended, cut, calls = 0, 0, 0
    for seed in range(3):
        fields = PLAIN | {"tools": tools(strict=True), "seed": seed, "logit_bias": {namespace: 4}, "max_tokens": 160}
        reply, reason = whole(client, **fields)
        assert streamed(client, **fields) == (reply, reason)
        assert without_drafts(speculating, plain, **fields) == reply
        ended += reason == "tool_calls"
        cut += reason == "length"
        if reason == "length":  # the last call may be cut off
            del reply.tool_calls[-1:]
        calls += len(reply.tool_calls)
        assert_valid(reply)
        assert reason == "length" or NAMESPACE not in reply.content
    assert ended + cut == 3
    assert calls >= 3


def test_each_of_several_choices_calls(client: OpenAI) -> None:
    fields = PLAIN | {"tools": tools(), "tool_choice": "required", "seed": 1, "n": 3}
    reply = client.chat.completions.create(model="tiny", messages=[USER], extra_body=fields)  # type: ignore[list-item]
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 3
    assert len({str(choice.message.tool_calls) for choice in reply.choices}) == 3


def test_a_forced_call_that_is_cut_off_ends_for_its_length(client: OpenAI) -> None:
    reply, reason = whole(client, **PLAIN | {"tools": tools(), "tool_choice": NAMED, "seed": 1, "max_tokens": 40})
    assert reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(reply.tool_calls[0].arguments)


def test_a_schema_that_calls_cannot_follow_is_refused_by_its_place(client: OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny",
                messages=[USER],  # type: ignore[list-item]
                stream=stream,
                extra_body={"tools": [tool], "tool_choice": "required"},
            )
        assert caught.value.param == "tools.0.function.parameters.properties.a.pattern"
