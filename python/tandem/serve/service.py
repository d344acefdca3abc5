"""What the endpoints share: the model as the HTTP process knows it, and the way from bodies to generations and back."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tandem.engine.chat import ChatTemplate
from tandem.engine.errors import InvalidParameterError, InvalidTokenIdError, check_token_ids
from tandem.engine.grammar import GrammarKind
from tandem.engine.tokenizer import Tokenizer
from tandem.serve.engine_client import EngineClient, Generation, Job
from tandem.serve.errors import ApiError, bad_request
from tandem.serve.messages import End, Piece, Ready, params_of
from tandem.serve.metrics import ServerMetrics
from tandem.serve.options import ServerOptions
from tandem.serve.protocol import SamplingBody

# Encoding a text takes about a microsecond per character; longer ones must not hold up the event loop.
_LONG_TEXT = 2000

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)


@dataclass(frozen=True)
class Service:
    """The served model."""

    options: ServerOptions
    client: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    metrics: ServerMetrics
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def ready(self) -> Ready:
        """What the engine told of itself; raises a 503 before it did."""
        if self.client.ready is None:
            raise self.client.not_ready()
        return self.client.ready

    def check_model(self, name: str | None) -> None:
        """Raises a 404 for a model that is not served; None stands for the one that is."""
        served = self.options.served_model_name
        if name is not None and name != served:
            raise ApiError(
                404, f"model {name!r} is not served here; {served!r} is", param="model", code="model_not_found"
            )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def generations(
        self,
        body: SamplingBody,
        prompts: Sequence[list[int]],
        params: dict[str, Any],
        param: str,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Generation]:
        """``n`` generations for each prompt, checked; ``param`` is the field that holds the prompts.

        Args:
            params: keyword arguments of `SamplingParams` beside those that ``body`` has.
            names: those fields of the body, by the parameter, that are not called as the parameter is.
        """
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is allowed with stream only", "stream_options")
        given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        every = {name: value for name, value in given.items() if value is not None} | params
        ready = self.ready
        try:
            params_of(every).check_vocabulary(ready.vocab_size)
        except InvalidParameterError as error:
            field = names.get(error.field, error.field)
            raise bad_request(str(InvalidParameterError(field, error.value, error.allowed)), field) from error
        except InvalidTokenIdError as error:
            raise bad_request(str(error), error.field) from error
        for ids in prompts:
            check_prompt(ids, ready, param)
        count = 1 if body.n is None else body.n
        if count < 1:
            raise bad_request(f"n={count} is not allowed: an integer >= 1", "n")
        if count * len(prompts) > self.options.max_requests:
            most = self.options.max_requests
            raise bad_request(f"{len(prompts)} prompts and n={count} are more than {most} generations", "n")
        return [Generation(ids, every | _seed(body.seed, choice)) for ids in prompts for choice in range(count)]


def check_prompt(ids: Sequence[int], ready: Ready, param: str) -> None:
    """Raises a 400 for a prompt that cannot be run."""
    if not ids:
        raise bad_request("the prompt is empty; at least one token is needed", param)
    if len(ids) > ready.max_prompt_tokens:
        raise bad_request(
            f"the prompt has {len(ids)} tokens; allowed are at most {ready.max_prompt_tokens}, so that one can be "
            "generated",
            param,
            "context_length_exceeded",
        )
    try:
        check_token_ids("the prompt", ids, ready.vocab_size)
    except InvalidTokenIdError as error:
        raise bad_request(str(error), param) from error


def grammar_of(body: SamplingBody, *, starts_after: str | None = None) -> dict[str, Any]:
    """What the text must follow, as a parameter; ``starts_after`` is the token before which it may be anything."""
    given = body.response_format
    kind: GrammarKind
    if body.grammar is not None:
        if given is not None and given.type != "text":
            raise bad_request("grammar and response_format exclude each other", "grammar")
        kind, source = body.grammar.type, body.grammar.source
    elif given is None or given.type == "text":
        return {}
    elif given.type == "json_object":
        kind, source = given.type, ""
    elif given.json_schema is None:
        raise bad_request("response_format.json_schema is missing", "response_format.json_schema")
    else:
        kind, source = given.type, json.dumps(given.json_schema.schema_)
    return {"grammar": {"kind": kind, "source": source, "starts_after": starts_after}}


def _seed(seed: int | None, choice: int) -> dict[str, int]:
    """The seed of one of ``n`` choices: they differ, and the first is that of a request for one. May be negative."""
    return {} if seed is None else {"seed": (seed + choice) % 2**64}


def new_id(prefix: str) -> str:
    """A name for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def outputs_of(job: Job, client: EngineClient, body: SamplingBody) -> list[Piece]:
    """The whole outputs of a job's generations, in order; raises an `ApiError` where one failed."""
    outputs: dict[int, Piece] = {}
    while job.num_unfinished:
        for index, piece in await job.take():
            raise_failure(piece.end, client, body)
            outputs[index] = piece
    return [outputs[index] for index in sorted(outputs)]


def raise_failure(end: End | None, client: EngineClient, body: SamplingBody) -> None:
    """Raises an `ApiError` for an end that is none of the request's own."""
    if end is None or end.finish_reason in ("stop", "length"):
        return
    if end.refused:
        param, text = end.param, end.error or ""
        if param == "grammar" and body.grammar is None:
            # The engine's name for what the reply must follow, wherever it came from.
            is_form = body.response_format is not None and body.response_format.type != "text"
            param = "response_format" if is_form else "tools"
            text = f"{param}={text.removeprefix('grammar=')}"
        raise bad_request(text, param)
    if end.finish_reason == "error" and not client.died.is_set():
        raise ApiError(500, f"the generation failed: {end.error}", code="generation_failed")
    reason = end.error or client.unhealthy() or "it was aborted"
    raise ApiError(503, f"the generation was not finished: {reason}", code="aborted")


def usage_of(prompts: Sequence[list[int]], completion_tokens: int, ends: Sequence[End]) -> dict[str, Any]:
    """Token counts of a request; the cached ones are those of each prompt's first choice."""
    prompt_tokens = sum(map(len, prompts))
    per_prompt = len(ends) // len(prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends[::per_prompt])},
    }
