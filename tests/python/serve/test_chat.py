"""`/v1/chat/completions`, and how conversations become prompts."""

import asyncio
import json
import re
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tandem import LLM, SamplingParams
from tests.python.serve.server_process import ServerProcess

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}},
}
FORCED = {"tool_choice": "required"}
FIELDS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return server.client()


def create(client: OpenAI, messages: Any = (USER,), **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=list(messages), extra_body=fields)


def rendered(server: ServerProcess, messages: Any, **fields: Any) -> str:
    """The prompt's text."""
    tokens = server.post("/tokenize", {"messages": list(messages), "model": "tiny", **fields}).json["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json["prompt"])


def test_a_reply_is_what_the_engine_says_to_the_rendered_prompt(client: OpenAI, llm: LLM) -> None:
    for mode in ("enabled", "disabled", "adaptive"):
        expected = llm.chat([USER], SamplingParams(**FIELDS), thinking_mode=mode)[0]
        reply = create(client, thinking_mode=mode, **FIELDS)
        message = reply.choices[0].message
        reasoning = message.model_extra["reasoning_content"]
        assert (reasoning, message.content) == ((expected.text, "") if mode == "enabled" else (None, expected.text))
        assert reply.usage.prompt_tokens == expected.prompt_tokens
        nested = create(client, chat_template_kwargs={"thinking_mode": mode}, **FIELDS)
        assert nested.choices[0].message == message


def test_a_stream_adds_up_to_the_whole_reply(client: OpenAI) -> None:
    whole = create(client, thinking_mode="disabled", n=2, **FIELDS)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        stream=True,
        stream_options={"include_usage": True},
        extra_body=FIELDS | {"n": 2, "thinking_mode": "disabled"},
    )
    texts, reasons, roles = ["", ""], [None, None], [0, 0]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert roles == [1, 1]
    assert usage == whole.usage or usage.total_tokens == whole.usage.total_tokens


def test_the_async_client_gets_the_same_replies_and_may_leave_a_stream(server: ServerProcess, client: OpenAI) -> None:
    fields: list[dict[str, Any]] = [FIELDS | {"seed": i, "thinking_mode": "disabled"} for i in range(6)]
    expected = [create(client, **each).choices[0].message.content for each in fields]

    async def run() -> list[str | None]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as other:

            async def one(i: int) -> str | None:
                request: dict[str, Any] = {"model": "tiny", "messages": [USER], "extra_body": fields[i]}
                if i % 2:
                    return (await other.chat.completions.create(**request)).choices[0].message.content
                left = await other.chat.completions.create(
                    model="tiny", messages=[USER], stream=True, extra_body={"max_tokens": 200, "ignore_eos": True}
                )
                async for _ in left:
                    break
                await left.close()
                stream = await other.chat.completions.create(**request, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one(i) for i in range(len(fields)))))

    before = server.get("/v1/stats").json["finished"]["abort"]
    assert asyncio.run(run()) == expected
    server.wait_until(lambda: server.get("/v1/stats").json["finished"]["abort"] == before + 3, 10)


def test_logprobs_come_with_bytes_and_alternatives(client: OpenAI, llm: LLM) -> None:
    expected = llm.chat([USER], SamplingParams(**FIELDS, logprobs=3))[0].logprobs
    assert expected is not None
    content = create(client, logprobs=True, top_logprobs=3, **FIELDS).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([e.logprob for e in expected], abs=1e-6)
    assert [bytes(entry.bytes) for entry in content] == [llm.tokenizer.token_bytes(e.token_id) for e in expected]
    assert [len(entry.top_logprobs) for entry in content] == [3] * 12
    stream = client.chat.completions.create(
        model="tiny", messages=[USER], stream=True, extra_body=FIELDS | {"logprobs": True, "top_logprobs": 3}
    )
    streamed = [e for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert streamed == content


def test_both_names_of_the_token_limit_work_and_must_agree(client: OpenAI) -> None:
    rest = {name: value for name, value in FIELDS.items() if name != "max_tokens"}
    assert create(client, max_completion_tokens=2, **rest).usage.completion_tokens == 2
    assert create(client, max_completion_tokens=2, max_tokens=2, **rest).usage.completion_tokens == 2
    with pytest.raises(BadRequestError) as caught:
        create(client, max_completion_tokens=2, max_tokens=3, **rest)
    assert caught.value.param == "max_completion_tokens"


def test_without_a_limit_a_reply_goes_on_to_the_models_end(client: OpenAI) -> None:
    usage = create(client, temperature=0, ignore_eos=True).usage
    assert usage.total_tokens == 256


def test_turns_reach_the_template(server: ServerProcess) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "good "}, {"type": "text", "text": "day"}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    assert rendered(server, messages, thinking_mode="disabled") == (
        "]~b]system\nbe kind[e~[\n"
        "]~b]user ann\ngood day[e~[\n"
        "]~b]assistant\n<mm:think>hm</mm:think>(f a=3)[e~[\n"
        "]~b]tool\n4[e~[\n"
        "]~b]ai\n</mm:think>"
    )
    assert rendered(server, [USER], add_generation_prompt=False) == "]~b]user\nhi[e~[\n"
    shouted = rendered(server, [USER], add_generation_prompt=False, chat_template_kwargs={"shout": True})
    assert shouted == "]~b]user\nhi[e~[\n!"
    assert '<tool>{"name": "weather"' in rendered(server, [USER], tools=[TOOL])


def test_a_reply_may_be_sent_back_as_the_client_gives_it(client: OpenAI) -> None:
    message = create(client, **FIELDS).choices[0].message
    assert message.model_extra["reasoning_content"]
    counts = {create(client, (USER, m, USER), **FIELDS).usage.prompt_tokens for m in (message, message.model_dump())}
    assert len(counts) == 1
    assert counts.pop() > create(client, (USER, USER), **FIELDS).usage.prompt_tokens


def test_what_the_template_does_not_know_is_refused(client: OpenAI) -> None:
    for kwargs in ({"whisper": True}, {"messages": []}, {"thinking_mode": "sometimes"}):
        with pytest.raises(BadRequestError) as caught:
            create(client, chat_template_kwargs=kwargs)
        assert caught.value.param == f"chat_template_kwargs.{next(iter(kwargs))}"


def test_no_tool_is_shown_where_none_may_be_chosen(client: OpenAI) -> None:
    shown = create(client, tools=[TOOL], **FIELDS).usage.prompt_tokens
    hidden = create(client, tools=[TOOL], tool_choice="none", **FIELDS).usage.prompt_tokens
    assert hidden == create(client, **FIELDS).usage.prompt_tokens < shown


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
BOUND = {"temperature": 1.0, "max_tokens": 200, "thinking_mode": "disabled"}


def test_a_reply_follows_its_schema_streamed_or_not(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        fields = BOUND | {"response_format": form, "seed": seed}
        choice = create(client, **fields).choices[0]
        value = json.loads(choice.message.content)
        assert choice.finish_reason == "stop"
        assert value["name"] in ("ann", "bob")
        assert 10 <= value["count"] <= 99
        stream = client.chat.completions.create(model="tiny", messages=[USER], stream=True, extra_body=fields)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == choice.message.content


def test_a_reply_follows_a_regular_expression_behind_its_reasoning(client: OpenAI, llm: LLM) -> None:
    grammar = {"type": "regex", "source": "[0-9]{3}-[a-f]{2}"}
    reply = create(client, grammar=grammar, seed=1, **BOUND).choices[0]
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", reply.message.content)
    # The reasoning is free; its end is made likely, so that it comes.
    bias = {str(llm.tokenizer.token_id("</mm:think>")): 4}
    thoughts = []
    for seed in range(4):
        fields = BOUND | {"thinking_mode": "enabled", "logit_bias": bias, "seed": seed, "grammar": grammar}
        reply = create(client, **fields).choices[0]
        thoughts.append(reply.message.model_extra["reasoning_content"])
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", reply.message.content)
    assert any(thoughts)


def test_forms_that_cannot_be_met_together_are_refused(client: OpenAI) -> None:
    form = {"type": "json_object"}
    for fields in ({"tools": [TOOL]}, {"grammar": {"type": "regex", "source": "x"}}, {"tools": [TOOL], **FORCED}):
        with pytest.raises(BadRequestError) as caught:
            create(client, response_format=form, **fields)
        assert caught.value.param == next(iter(fields))
