"""``/v1/chat/completions``: a conversation becomes a prompt, and the reply reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any, cast

from starlette.responses import Response

from tandem.engine.chat import Message, ThinkingMode
from tandem.engine.errors import InvalidChatError
from tandem.engine.tokenizer import THINK_CLOSE
from tandem.serve.answers import DONE, EventStream, JsonAnswer, event
from tandem.serve.engine_client import Job
from tandem.serve.errors import bad_request
from tandem.serve.messages import End, Piece
from tandem.serve.protocol import ChatBody, ChatMessage, ConversationBody
from tandem.serve.reasoning import ContentText, ReasoningText
from tandem.serve.service import Service, grammar_of, new_id, outputs_of, raise_failure, usage_of
from tandem.serve.token_logprobs import chat_logprobs
from tandem.serve.tool_calls import Delta, Reply, ReplyParser, ToolCallStart
from tandem.serve.tool_grammar import binding_field, call_grammar

_OWN_VARIABLES = ("messages", "tools", "thinking_mode", "add_generation_prompt")


async def chat(service: Service, body: ChatBody, deadline: float) -> Response:
    """Run a chat completion."""
    service.check_model(body.model)
    tools = _tools(body)
    prompt = await encode_conversation(service, body)
    params = {"max_tokens": _max_tokens(body)} | await _grammar(service, body, tools)
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise bad_request("top_logprobs is allowed with logprobs only", "top_logprobs")
    names = {"logprobs": "top_logprobs"} | ({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})
    generations = service.generations(body, [prompt], params, "messages", names)
    job = service.client.submit(generations, stream=bool(body.stream))
    answer = _Chat(service, body, prompt, tools)
    if body.stream:
        return EventStream(job, deadline, answer.events(job))

    async def whole() -> dict[str, Any]:
        return answer.whole(await outputs_of(job, service.client, body))

    return JsonAnswer(job, deadline, whole)


async def encode_conversation(
    service: Service, body: ConversationBody, *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation's prompt.

    Raises:
        ApiError: the conversation does not fit the model's chat template.
    """
    template = service.chat_template
    variables = dict(body.chat_template_kwargs or {})
    variables.pop("thinking_mode", None)
    for name in variables:
        if name in _OWN_VARIABLES or not template.takes(name):
            raise bad_request(f"the model's chat template takes no {name}", f"chat_template_kwargs.{name}")
    if body.tools and not (isinstance(body, ChatBody) and _chosen(body) == "none"):
        if not template.takes("tools"):
            raise bad_request("the model's chat template takes no tools", "tools")
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    turns = [cast(Message, _turn(service, message, place)) for place, message in enumerate(body.messages)]
    mode = thinking_mode_of(body)

    def render() -> str:
        return template.render(turns, add_generation_prompt=add_generation_prompt, thinking_mode=mode, **variables)

    try:
        text = await asyncio.to_thread(render)
    except InvalidChatError as error:
        raise bad_request(str(error), "messages") from error
    return await service.encode(text)


def thinking_mode_of(body: ConversationBody) -> ThinkingMode:
    """The mode that a body asks for, in either place."""
    nested = (body.chat_template_kwargs or {}).get("thinking_mode")
    if nested is not None and nested not in ("enabled", "disabled", "adaptive"):
        raise bad_request(
            f"thinking_mode={nested!r} is not allowed: enabled, disabled or adaptive",
            "chat_template_kwargs.thinking_mode",
        )
    if nested is not None and body.thinking_mode not in (None, nested):
        raise bad_request("thinking_mode and chat_template_kwargs.thinking_mode differ", "thinking_mode")
    return cast(ThinkingMode, body.thinking_mode or nested or "enabled")


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is None:
        return body.max_completion_tokens
    if body.max_completion_tokens not in (None, body.max_tokens):
        raise bad_request("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
    return body.max_tokens


async def _grammar(service: Service, body: ChatBody, tools: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the reply must follow: calls from its first token, other forms behind the reasoning that a prompt opens."""
    mode = thinking_mode_of(body)
    reasons = mode == "enabled" and service.tokenizer.token_id(THINK_CLOSE) is not None
    grammar = grammar_of(body, starts_after=THINK_CLOSE if reasons else None)
    if grammar and tools is not None:
        raise bad_request("tools and a form that the reply must follow exclude each other", "tools")
    if binding_field(body) is None:
        return grammar
    return {"grammar": asdict(await asyncio.to_thread(call_grammar, body, service.tokenizer, mode))}


def _chosen(body: ChatBody) -> str:
    """Whether tools are called: none, auto or required."""
    return "auto" if body.tool_choice is None else body.tool_choice.mode


def _tools(body: ChatBody) -> Mapping[str, Any] | None:
    """The schemas of the tools that the reply may call, by name; None where it may call none."""
    if not body.tools:
        if body.tool_choice is not None and body.tool_choice.mode != "none":
            raise bad_request("tool_choice is allowed with tools only", "tool_choice")
        if body.parallel_tool_calls is not None:
            raise bad_request("parallel_tool_calls is allowed with tools only", "parallel_tool_calls")
        return None
    schemas: dict[str, Any] = {}
    for place, tool in enumerate(body.tools):
        if tool.function.name in schemas:
            raise bad_request(f"tool {tool.function.name!r} is given twice", f"tools.{place}.function.name")
        schemas[tool.function.name] = tool.function.parameters or {}
    name = None if body.tool_choice is None else body.tool_choice.name
    if name is not None and name not in schemas:
        raise bad_request(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
    return None if _chosen(body) == "none" else schemas


def _turn(service: Service, message: ChatMessage, place: int) -> dict[str, Any]:
    """A message as chat templates expect it: arguments of tool calls are objects."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content or "",
    }
    if message.content is None and not message.tool_calls:
        raise bad_request(f"messages.{place}.content is missing", f"messages.{place}.content")
    for name in ("name", "tool_calls"):
        if getattr(message, name) is not None and not service.chat_template.takes(name):
            path = f"messages.{place}.{name}"
            raise bad_request(f"{path}: the model's chat template does not use it", path)
    turn |= message.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, place, i)},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _arguments(text: str, place: int, call: int) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        path = f"messages.{place}.tool_calls.{call}.function.arguments"
        raise bad_request(f"{path} is not a JSON object", path)
    return value


class _Chat:
    """The answer to one request."""

    def __init__(self, service: Service, body: ChatBody, prompt: list[int], tools: Mapping[str, Any] | None) -> None:
        self._service = service
        self._body = body
        self._prompt = prompt
        mode = thinking_mode_of(body)
        self._parsers = [ReplyParser(mode, tools) for _ in range(body.n or 1)]
        self._has_calls = [False] * len(self._parsers)
        self._id = new_id("chatcmpl")
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._service.options.served_model_name
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def whole(self, outputs: list[Piece]) -> dict[str, Any]:
        choices = []
        ends = []
        for index, output in enumerate(outputs):
            assert output.end is not None
            ends.append(output.end)
            reply = Reply()
            reply.add(self._parse(index, output))
            message: dict[str, Any] = {
                "role": "assistant",
                "content": reply.content if reply.content or not reply.tool_calls else None,
                "reasoning_content": reply.reasoning or None,
                "refusal": None,
            }
            if reply.tool_calls:
                message["tool_calls"] = [
                    {"id": new_id("call"), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in reply.tool_calls
                ]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(output),
                    "finish_reason": self._finish_reason(index, output.end),
                    "stop_reason": output.end.stop_reason,
                }
            )
        generated = sum(output.num_tokens for output in outputs)
        usage = usage_of([self._prompt], generated, ends)
        return self._head("chat.completion") | {"choices": choices, "usage": usage}

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        head = self._head("chat.completion.chunk")
        rest = {"usage": None} if self._body.include_usage else {}
        ends: dict[int, End] = {}
        generated = 0
        begun: set[int] = set()
        while job.num_unfinished:
            data = []
            for index, piece in await job.take():
                raise_failure(piece.end, self._service.client, self._body)
                generated += piece.num_tokens
                choices = [] if index in begun else [_chunk_choice(index, {"role": "assistant", "content": ""})]
                begun.add(index)
                choices += self._chunk_choices(index, piece)
                data += [event(head | {"choices": [choice]} | rest) for choice in choices]
                if piece.end is not None:
                    ends[index] = piece.end
            if data:
                yield b"".join(data)
        if self._body.include_usage:
            usage = usage_of([self._prompt], generated, [ends[index] for index in sorted(ends)])
            yield event(head | {"choices": [], "usage": usage}) + DONE
        else:
            yield DONE

    def _chunk_choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        choices = [_chunk_choice(index, _wire_delta(delta)) for delta in self._parse(index, piece)]
        logprobs = self._logprobs(piece)
        if piece.end is not None:
            last = _chunk_choice(index, {}, self._finish_reason(index, piece.end))
            choices.append(last | {"stop_reason": piece.end.stop_reason})
        if logprobs is not None and logprobs["content"]:
            if not choices:
                choices.append(_chunk_choice(index, {}))
            choices[0]["logprobs"] = logprobs
        return choices

    def _parse(self, index: int, piece: Piece) -> list[Delta]:
        parser = self._parsers[index]
        deltas = list(parser.feed(piece.text))
        if piece.end is not None:
            deltas += parser.finish()
        self._has_calls[index] |= any(isinstance(delta, ToolCallStart) for delta in deltas)
        return deltas

    def _finish_reason(self, index: int, end: End) -> str:
        """A reply whose calls are complete ends for them; a call that was cut off must not be run.

        The call of a named tool was no choice of the model: OpenAI's API, and vLLM, report a plain ``stop``.
        """
        whole_calls = self._has_calls[index] and not self._parsers[index].unfinished
        chosen = self._body.tool_choice is None or self._body.tool_choice.name is None
        return "tool_calls" if whole_calls and chosen and end.finish_reason == "stop" else end.finish_reason

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return chat_logprobs(self._service.tokenizer, piece.logprobs or []) if self._body.logprobs else None


def _chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _wire_delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case ReasoningText(text):
            return {"reasoning_content": text}
        case ContentText(text):
            return {"content": text}
        case ToolCallStart(index, name):
            call = {"index": index, "id": new_id("call"), "type": "function"}
            return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.fragment}}]}
