"""``/v1/completions``: prompts as texts or ids, continued."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from tandem.serve.answers import DONE, EventStream, JsonAnswer, event
from tandem.serve.engine_client import Job
from tandem.serve.errors import bad_request
from tandem.serve.messages import End, Piece
from tandem.serve.protocol import CompletionBody
from tandem.serve.service import Service, grammar_of, new_id, outputs_of, raise_failure, usage_of
from tandem.serve.token_logprobs import CompletionLogprobs

_DEFAULT_MAX_TOKENS = 16


async def complete(service: Service, body: CompletionBody, deadline: float) -> Response:
    """Run a completion."""
    service.check_model(body.model)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens=0 is allowed with echo only", "max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed: they are known at the end", "stream")
    prompts = [await service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    # The engine generates at least one token; the answer to max_tokens=0 leaves it out.
    params: dict[str, Any] = {"max_tokens": 1 if max_tokens == 0 else max_tokens} | grammar_of(body)
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            params["prompt_logprobs"] = body.logprobs
    job = service.client.submit(service.generations(body, prompts, params, "prompt"), stream=bool(body.stream))
    answer = _Completion(service, body, prompts, echo_only=max_tokens == 0)
    if body.stream:
        return EventStream(job, deadline, answer.events(job))

    async def whole() -> dict[str, Any]:
        return answer.whole(await outputs_of(job, service.client, body))

    return JsonAnswer(job, deadline, whole)


class _Completion:
    """The answer to one request."""

    def __init__(self, service: Service, body: CompletionBody, prompts: list[list[int]], *, echo_only: bool) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._echo_only = echo_only
        self._per_prompt = body.n or 1
        count = len(prompts) * self._per_prompt
        self._logprobs = [CompletionLogprobs(service.tokenizer) for _ in range(count)]
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.options.served_model_name,
        }

    def whole(self, outputs: list[Piece]) -> dict[str, Any]:
        ends = [output.end for output in outputs if output.end is not None]
        choices = []
        for index, (output, end) in enumerate(zip(outputs, ends, strict=True)):
            ids, entries = self._shown_tokens(index, output, end)
            logprobs = None if self._body.logprobs is None else self._logprobs[index].render(ids, entries)
            text = self._echoed(index) + ("" if self._echo_only else output.text)
            choices.append(_choice(index, text, logprobs, "length" if self._echo_only else end.finish_reason, end))
        generated = 0 if self._echo_only else sum(output.num_tokens for output in outputs)
        return self._head | {"choices": choices, "usage": usage_of(self._prompts, generated, ends)}

    def _shown_tokens(self, index: int, output: Piece, end: End) -> tuple[list[int], list[Any]]:
        entries: list[Any] = [] if self._echo_only else list(output.logprobs or [])
        ids = [entry[0] for entry in entries]
        if end.prompt_logprobs is None:
            return ids, entries
        return [*self._prompts[index // self._per_prompt], *ids], [*end.prompt_logprobs, *entries]

    def _echoed(self, index: int) -> str:
        """The prompt's text, if it is asked for."""
        place = index // self._per_prompt
        prompt = self._body.prompt[place]
        if not self._body.echo:
            return ""
        return prompt if isinstance(prompt, str) else self._service.tokenizer.decode(prompt, skip_special_tokens=False)

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        ends: dict[int, End] = {}
        generated = 0
        rest = {"usage": None} if self._body.include_usage else {}
        begun: set[int] = set()
        while job.num_unfinished:
            data = []
            for index, piece in await job.take():
                raise_failure(piece.end, self._service.client, self._body)
                text, reason = ("" if self._echo_only else piece.text), None
                if index not in begun:
                    begun.add(index)
                    text = self._echoed(index) + text
                if piece.end is not None:
                    ends[index] = piece.end
                    reason = "length" if self._echo_only else piece.end.finish_reason
                logprobs = None
                if piece.logprobs:
                    ids = [entry[0] for entry in piece.logprobs]
                    logprobs = self._logprobs[index].render(ids, piece.logprobs)
                generated += 0 if self._echo_only else piece.num_tokens
                if text or logprobs or reason:
                    choice = _choice(index, text, logprobs, reason, piece.end)
                    data.append(event(self._head | {"choices": [choice]} | rest))
            if data:
                yield b"".join(data)
        if self._body.include_usage:
            usage = usage_of(self._prompts, generated, [ends[index] for index in sorted(ends)])
            yield event(self._head | {"choices": [], "usage": usage}) + DONE
        else:
            yield DONE


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, end: End | None
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return choice if end is None else choice | {"stop_reason": end.stop_reason}
