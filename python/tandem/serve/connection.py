"""What one connection may take: the size of a request's head, the time to send it, and the time to take an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class ConnectionLimits:
    """Of one connection.

    Attributes:
        send_timeout_s: how long a full write buffer may stay full.
        head_timeout_s: how long a request's line and headers may take, and the first ones from the connection's start.
        max_head_bytes: size of a request's line and headers.
    """

    send_timeout_s: float
    head_timeout_s: float
    max_head_bytes: int = 64 * 1024


def bounded_protocol(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn that closes connections which pass the limits."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _send_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            # Bodies have a limit of their own; the parser would keep a head of any size.
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > limits.max_head_bytes and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._await_head()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._cancel_head_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_head, self._head_bytes = True, 0

        def pause_writing(self) -> None:
            super().pause_writing()
            self._send_timer = self.loop.call_later(limits.send_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            if self._send_timer is not None:
                self._send_timer.cancel()
            super().resume_writing()

        def _await_head(self) -> None:
            self._cancel_head_timer()
            self._head_timer = self.loop.call_later(limits.head_timeout_s, self.transport.abort)

        def _cancel_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()

        def _cancel_timers(self) -> None:
            self._cancel_head_timer()
            if self._send_timer is not None:
                self._send_timer.cancel()

    return BoundedProtocol
