"""Reasoning, content and tool calls of a reply that is known to the letter, streamed and whole, through the client."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from openai import BadRequestError, OpenAI

from tests.python.serve.conftest import TEMPLATE
from tests.python.serve.server_process import serve_scripted

pytestmark = pytest.mark.slow

N = "]<]minimax[>["
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer"}, "place": {"type": "string"}},
            },
        },
    }
]
ONE = f'{N}<invoke name="weather">{N}<days>3{N}</days>{N}<place>Köln "West"{N}</place>{N}</invoke>'
TWO = f'{N}<invoke name="weather">{N}<place>7{N}</place>{N}</invoke>'
CALLS = f"{N}<tool_call>{ONE}{TWO}{N}</tool_call>"
ARGUMENTS = [{"days": 3, "place": 'Köln "West"'}, {"place": "7"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("reply")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with serve_scripted(folder, "--tokens-per-round", "3") as server:
        yield server.client()


def both(client: OpenAI, text: str, **fields: Any) -> list[tuple[str, str, list[tuple[str, str]], str]]:
    """(reasoning, content, calls, finish reason) of the whole reply and of the streamed one."""
    request = {"model": "scripted", "messages": [{"role": "user", "content": f"spell={quote(text)}"}]}
    extra = {"thinking_mode": "enabled"} | fields
    choice = client.chat.completions.create(**request, extra_body=extra).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = (choice.message.model_extra or {})["reasoning_content"] or ""
    results = [(reasoning, choice.message.content or "", calls, choice.finish_reason)]
    reasoning, content, reason = "", "", ""
    streamed: dict[int, list[str]] = {}
    ids: set[str] = set()
    for chunk in client.chat.completions.create(**request, stream=True, extra_body=extra):
        delta = chunk.choices[0].delta
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index not in streamed, "a call begins twice"
                streamed[call.index] = [call.function.name, ""]
                ids.add(call.id)
            streamed[call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert len(ids) == len(streamed)
    results.append((reasoning, content, [(name, arguments) for name, arguments in streamed.values()], reason))
    return results


def test_reasoning_and_content_are_told_apart(client: OpenAI) -> None:
    for result in both(client, "I add.</mm:think>It is 7."):
        assert result == ("I add.", "It is 7.", [], "stop")
    for result in both(client, "</mm:think>It is 7.", thinking_mode="disabled"):
        assert result == ("", "It is 7.", [], "stop")
    for result in both(client, "<mm:think>Hm.</mm:think>It is 7.", thinking_mode="adaptive"):
        assert result == ("Hm.", "It is 7.", [], "stop")


def test_parallel_tool_calls_have_the_types_of_their_schema(client: OpenAI) -> None:
    for reasoning, content, calls, reason in both(client, f"I ask.</mm:think>Wait.{CALLS}", tools=TOOLS):
        assert (reasoning, content, reason) == ("I ask.", "Wait.", "tool_calls")
        assert [name for name, _ in calls] == ["weather", "weather"]
        assert [json.loads(arguments) for _, arguments in calls] == ARGUMENTS


def test_a_call_is_text_where_no_tool_was_offered(client: OpenAI) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        for result in both(client, f"</mm:think>{CALLS}", **fields):
            assert result == ("", CALLS, [], "stop")


def test_a_call_that_is_cut_off_is_never_whole(client: OpenAI) -> None:
    for _, _, calls, reason in both(client, f"</mm:think>{CALLS[:70]}", tools=TOOLS):
        assert reason == "stop"
        assert len(calls) == 1
        with pytest.raises(json.JSONDecodeError):
            json.loads(calls[0][1])
    for _, _, _, reason in both(client, f"</mm:think>{CALLS}", tools=TOOLS, max_tokens=60):
        assert reason == "length"


def test_calls_are_not_bound_where_the_vocabulary_has_no_token_for_them(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        both(client, CALLS, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "tool_choice"
