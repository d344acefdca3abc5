"""Answers on the wire: JSON bodies and event streams that end their generations when the client goes or time is up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.serve.engine_client import Job
from tandem.serve.errors import ApiError

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def json_bytes(value: Any) -> bytes:
    """JSON of plain values."""
    return _encoder.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer that is there."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The answer to a request that failed."""
    return json_response(error.body(), error.status, error.headers())


def fault(error: Exception) -> ApiError:
    """The answer where the server itself is at fault."""
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error")


class GeneratedAnswer(Response, ABC):
    """An answer that generations make; they are aborted if the client goes, or at the deadline.

    Args:
        job: the generations.
        deadline: time of the event loop at which the answer must be complete.
    """

    def __init__(self, job: Job, deadline: float) -> None:
        self.job = job
        self.deadline = deadline
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI asks for."""
        answer = asyncio.ensure_future(self.send_by_deadline(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            self.job.abandon()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def send_by_deadline(self, send: Send) -> None:
        """Send the answer; raises an `ApiError` where none of it has been sent."""
        try:
            async with asyncio.timeout_at(self.deadline):
                await self.send_answer(send)
        except TimeoutError:
            raise ApiError(504, "the request took longer than the server allows", code="timeout") from None

    @abstractmethod
    async def send_answer(self, send: Send) -> None:
        """Send the answer."""


class JsonAnswer(GeneratedAnswer):
    """One JSON body, once everything is there."""

    def __init__(self, job: Job, deadline: float, body: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(job, deadline)
        self.body_of = body

    async def send_answer(self, send: Send) -> None:
        """Wait for the generations and send the body."""
        body = json_bytes(await self.body_of())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class EventStream(GeneratedAnswer):
    """Server-sent events. What fails before the first gives the answer its status; afterwards it is the last event.

    A stream is complete exactly if it ends with ``[DONE]``.
    """

    def __init__(self, job: Job, deadline: float, events: AsyncIterator[bytes]) -> None:
        super().__init__(job, deadline)
        self.events = events
        self.has_begun = False

    async def send_by_deadline(self, send: Send) -> None:
        """Send the events, and what went wrong as the last one."""
        try:
            await super().send_by_deadline(send)
        except ApiError as error:
            if not self.has_begun:
                raise
            await send({"type": "http.response.body", "body": event(error.body())})
        except Exception as error:  # raised again, for the log
            if self.has_begun:
                await send({"type": "http.response.body", "body": event(fault(error).body())})
            raise

    async def send_answer(self, send: Send) -> None:
        """Send the events as they come."""
        first = await anext(self.events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for data in self.events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
