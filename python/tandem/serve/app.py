"""The HTTP interface: routes, keys, body limits, and errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.engine.errors import InvalidTokenIdError, check_token_ids
from tandem.serve.answers import error_response, fault, json_response
from tandem.serve.canary_watch import CanaryWatch
from tandem.serve.chat import chat, encode_conversation
from tandem.serve.completions import complete
from tandem.serve.errors import ApiError, bad_request
from tandem.serve.messages import StepsWanted
from tandem.serve.metrics import CONTENT_TYPE
from tandem.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    parse_body,
    parse_tokenize_body,
)
from tandem.serve.service import Service

_log = logging.getLogger(__name__)

_METRICS_WAIT_S = 1.0
# Whoever watches a server is not one of its users.
_OPEN_PATHS = frozenset({"/health", "/live", "/metrics"})

_BodyKind = TypeVar("_BodyKind", bound=Body)
Endpoint = Callable[[Request], Awaitable[Response]]
Generate = Callable[[Service, _BodyKind, float], Awaitable[Response]]


def make_app(service: Service, canary: CanaryWatch | None = None) -> ASGIApp:
    """The application that serves a model; ``canary`` is what replays prompts beside it."""
    endpoints = _Endpoints(service, canary)
    routes = [
        Route("/v1/chat/completions", endpoints.generating(ChatBody, chat), methods=["POST"]),
        Route("/v1/completions", endpoints.generating(CompletionBody, complete), methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/v1/stats", endpoints.stats, methods=["GET", "POST"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/live", endpoints.live, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: endpoints.on_api_error, HTTPException: _on_http_error, Exception: _on_fault},
    )
    return _Keys(app, service)


class _Endpoints:
    def __init__(self, service: Service, canary: CanaryWatch | None) -> None:
        self._service = service
        self._canary = canary

    def generating(self, kind: type[_BodyKind], run: Generate[_BodyKind]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            deadline = asyncio.get_running_loop().time() + self._service.options.request_timeout_s
            body = parse_body(kind, await self._read(request))
            return await run(self._service, body, deadline)

        return endpoint

    async def _read(self, request: Request) -> bytes:
        """The body, no longer than allowed and no later than the deadline."""
        options = self._service.options
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise bad_request(f"content-type is {content_type or 'missing'}; allowed is application/json")
        length = request.headers.get("content-length", "0")
        too_long = ApiError(413, f"the body is longer than {options.max_body_bytes} bytes", code="body_too_large")
        if not length.isdecimal() or int(length) > options.max_body_bytes:
            raise too_long

        async def read() -> bytes:
            data = bytearray()
            async for part in request.stream():
                data += part
                if len(data) > options.max_body_bytes:
                    raise too_long
            return bytes(data)

        # A body that is slow to come must not hold up the server's end.
        body, ending = asyncio.ensure_future(read()), asyncio.ensure_future(self._service.client.ending.wait())
        try:
            await asyncio.wait((body, ending), timeout=options.request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                return body.result()
            if ending.done():
                raise self._service.client.not_ready()
            raise ApiError(408, "the body did not arrive in time", code="timeout")
        except ClientDisconnect:
            raise bad_request("the client went before its body had come") from None
        finally:
            body.cancel()
            ending.cancel()

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.options.served_model_name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "tandem",
            "max_model_len": self._service.ready.max_model_len,
        }

    async def stats(self, request: Request) -> Response:
        """GET gives the counters, with ``?window=read`` the records of the last steps too; POST drains these."""
        asked = request.query_params.get("window")
        if asked not in (None, "read"):
            raise bad_request(f"window={asked!r} is not allowed: read", "window")
        wanted: StepsWanted = "drain" if request.method == "POST" else "none" if asked is None else "read"
        wait_s = self._service.options.stall_s
        try:
            async with asyncio.timeout(wait_s):
                reply = await self._service.client.stats(wanted)
        except TimeoutError:
            raise ApiError(503, f"the engine did not answer for {wait_s:g} s", code="engine_stalled") from None
        window = {} if reply.steps is None else {"window": reply.steps.to_dict()}
        canary = {} if self._canary is None else {"canary": self._canary.state()}
        return json_response(reply.stats.to_dict() | canary | window)

    async def metrics(self, request: Request) -> Response:
        """Where the engine does not answer in time, its counters are those of its last answer."""
        metrics = self._service.metrics
        try:
            async with asyncio.timeout(_METRICS_WAIT_S):
                metrics.update((await self._service.client.stats()).stats)
        except (TimeoutError, ApiError) as error:
            _log.warning("the engine's counters are not fresh: %s", str(error) or "it does not answer")
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def on_api_error(self, request: Request, error: Exception) -> Response:
        """The answer to a request that is refused."""
        assert isinstance(error, ApiError)
        self._service.metrics.count_refused(error.status)
        return error_response(error)

    async def tokenize(self, request: Request) -> Response:
        body = parse_tokenize_body(await self._read(request))
        self._service.check_model(body.model)
        if isinstance(body, TokenizeChatBody):
            opens_reply = body.add_generation_prompt is not False
            ids = await encode_conversation(self._service, body, add_generation_prompt=opens_reply)
        else:
            ids = await self._service.encode(body.prompt)
        ready = self._service.ready
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": ready.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await self._read(request))
        self._service.check_model(body.model)
        try:
            check_token_ids("tokens", body.tokens, self._service.ready.vocab_size)
        except InvalidTokenIdError as error:
            raise bad_request(str(error), "tokens") from error
        hides = bool(body.skip_special_tokens)
        text = await asyncio.to_thread(self._service.tokenizer.decode, body.tokens, skip_special_tokens=hides)
        return json_response({"prompt": text})

    async def health(self, request: Request) -> Response:
        """Readiness: whether requests should be sent here now."""
        reason = self._service.client.unhealthy()
        if reason is None:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": reason}, 503)

    async def live(self, request: Request) -> Response:
        """Liveness: the HTTP process answers."""
        return json_response({"status": "ok"})


class _Keys:
    """Lets requests through that bear one of the keys."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._count_refused = service.metrics.count_refused
        self._expected = [f"Bearer {key}".encode() for key in service.options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI asks for."""
        if scope["type"] == "http" and self._expected and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            # Every key is compared, each in a time that does not tell how much of it was right.
            if sum(hmac.compare_digest(given, expected) for expected in self._expected) == 0:
                refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                self._count_refused(refusal.status)
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
    response = error_response(ApiError(error.status_code, messages.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    # Starlette raises it again for the log.
    return error_response(fault(error))
