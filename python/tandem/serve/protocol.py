"""The bodies of requests: which fields there are, and of which type.

A field that is not listed here is refused, so that nothing is accepted that has no effect. The ones that OpenAI's API
has for bookkeeping of its own (`NO_EFFECT`) are accepted, since no answer depends on them. Ranges are checked where
they are defined: by `SamplingParams` and by the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tandem.serve.errors import ApiError, bad_request

NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Looking for stop strings costs time in every step, for all requests.
MAX_STOPS = 16
MAX_STOP_LENGTH = 256


def _texts(value: object) -> object:
    """One text as a list of one."""
    return [value] if isinstance(value, str) else value


def _content(value: object) -> object:
    """A message's content; text parts are joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('parts must be {"type": "text", "text": "..."}; nothing but text is supported')
        texts.append(part["text"])
    return "".join(texts)


def _tool_choice(value: object) -> object:
    """A choice among tools, in either form."""
    match value:
        case None:
            return None
        case "none" | "auto" | "required":
            return {"mode": value}
        case {"type": "function", "function": {"name": str(name), **inner}, **outer} if not inner and not outer:
            return {"mode": "required", "name": name}
    raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": "..."}}')


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: object) -> object:
    """The prompts of a completion as a list: each a text or a list of ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) or _is_ids(item) for item in value):
        return value
    raise ValueError("must be a text, a list of token ids, or a non-empty list of these")


Text = Annotated[str, Field(max_length=MAX_STOP_LENGTH, min_length=1)]
Stops = Annotated[list[Text], BeforeValidator(_texts), Field(max_length=MAX_STOPS)]
Content = Annotated[str | None, BeforeValidator(_content)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class Body(BaseModel):
    """A request body: exact types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class JsonSchemaFormat(Body):
    """A schema that the text must follow, whether or not it is called strict."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GrammarBody(Body):
    """A regular expression, or a grammar (Lark or GBNF), that the text must follow."""

    type: Literal["regex", "grammar"]
    source: Annotated[str, Field(min_length=1)]


class SamplingBody(Body):
    """What chat and text completions have in common."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    grammar: GrammarBody | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SamplingBody):
    """Of ``/v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None


class FunctionCall(Body):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """One call that an earlier turn of the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients repeat of a reply that has none of these.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoice(Body):
    """Whether a tool is called. A named one is required, as the only one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the reply must be a call."""
        return self.mode == "required"


ThinkingMode = Literal["enabled", "disabled", "adaptive"]


class ConversationBody(Body):
    """A conversation and how it becomes a prompt."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolSpec] | None = None
    thinking_mode: ThinkingMode | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(SamplingBody, ConversationBody):
    """Of ``/v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None


class TokenizeTextBody(Body):
    """Of ``/tokenize``, for a text."""

    model: str | None = None
    prompt: str


class TokenizeChatBody(ConversationBody):
    """Of ``/tokenize``, for a conversation."""

    model: str | None = None  # type: ignore[assignment]
    add_generation_prompt: bool | None = None


class DetokenizeBody(Body):
    """Of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class _MaybeConversation(BaseModel):
    messages: Any = None


def parse_tokenize_body(data: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """Read a body of ``/tokenize``: a conversation has messages, a text has a prompt.

    Raises:
        ApiError: as `parse_body`.
    """
    try:
        is_chat = "messages" in _MaybeConversation.model_validate_json(data).model_fields_set
    except pydantic.ValidationError:
        is_chat = False  # it is no object at all, which is said below
    return parse_body(TokenizeChatBody, data) if is_chat else parse_body(TokenizeTextBody, data)


_T = TypeVar("_T", bound=Body)


def parse_body(kind: type[_T], data: bytes) -> _T:
    """Read a body.

    Raises:
        ApiError: it is not JSON, or a field is unknown, missing or of the wrong type; the field is named.
    """
    try:
        return kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """The first fault, with the field's path."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = faults[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    # A union adds its members' names to the path; a field's name is all that a client knows.
    path = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())
    match first["type"]:
        case "extra_forbidden":
            text = f"{path} is not a known field"
        case "missing":
            text = f"{path} is missing"
        case _:
            message = first["msg"].removeprefix("Value error, ")
            text = f"{path}: {message[:1].lower()}{message[1:]}" if path else f"the body: {message}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return bad_request(text + more, param=path or None)
