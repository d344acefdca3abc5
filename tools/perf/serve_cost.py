"""What the server costs: streams of an engine that costs nothing, read by a client on the same machine.

    python -m tools.perf.serve_cost [--streams 64] [--tokens 2000] [--rate 20000]

Two measurements. *Capacity*: the engine says tokens as fast as they are taken; what the client gets per second is what
HTTP, the channel and the client can do together. *Added time*: the engine says a few tokens per stream and round at a
steady total rate, each with the time at which it was said; the client compares with the time at which the token's event
came: over all tokens, and over those after the first half second, in which all streams are asked for at once.

The client is plain asyncio sockets on uvloop with a minimal reader of server-sent events, in a process of its own, so
what it costs is small but counted in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from tests.python.serve.server_process import ServerProcess, serve_scripted

_START_S = 0.5
_CONTENT = re.compile(rb'"content":"([0-9 ]*)"')


@dataclass
class Measured:
    """What the client saw."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_events: int = 0
    added_s: list[float] = field(default_factory=list)
    steady_s: list[float] = field(default_factory=list)
    """As `added_s`, of the tokens that came after the start."""
    cpu_s: dict[str, float] = field(default_factory=dict)


def _percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


class _Stream(asyncio.Protocol):
    """Asks for one chat completion and reads its events; `done` has the number of tokens that came, once all did."""

    def __init__(self, num_tokens: int, measured: Measured) -> None:
        message = {"role": "user", "content": "stamp=1"}
        body = {"model": "scripted", "messages": [message], "max_tokens": num_tokens, "stream": True}
        self._body = json.dumps(body | {"thinking_mode": "disabled"}).encode()
        self._measured = measured
        self._rest = b""
        self._num_tokens = 0
        self._start = 0.0
        self._ended = False
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self._start = time.monotonic()
        transport.write(head.encode() + f"content-length: {len(self._body)}\r\n\r\n".encode() + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        lines = whole + newline
        self._ended |= b"data: [DONE]" in lines
        for content in _CONTENT.findall(lines):
            stamps = content.split()
            if not stamps:
                continue
            self._num_tokens += len(stamps)
            self._measured.num_events += 1
            added = [(now - int(stamp)) / 1e9 for stamp in stamps]
            self._measured.added_s += added
            if now / 1e9 - self._start > _START_S:
                self._measured.steady_s += added

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended:
            self.done.set_result(self._num_tokens)
        else:
            self.done.set_exception(ConnectionError(f"the stream ended after {self._num_tokens} tokens: {error}"))


async def _stream(port: int, num_tokens: int, measured: Measured) -> None:
    """One chat completion, read to its end."""
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: _Stream(num_tokens, measured), "127.0.0.1", port)
    seen = await stream.done
    measured.num_tokens += seen
    if seen != num_tokens:
        raise ConnectionError(f"{seen} tokens came of {num_tokens}")


def measure(server: ServerProcess, num_streams: int, num_tokens: int) -> Measured:
    """Run the streams at once."""

    async def run() -> Measured:
        measured = Measured()
        pids = {"http": server.pid, "engine": server.engine_pid, "client": os.getpid()}
        before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
        start = time.monotonic()
        await asyncio.gather(*(_stream(server.port, num_tokens, measured) for _ in range(num_streams)))
        measured.seconds = time.monotonic() - start
        measured.cpu_s = {name: _cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        return measured

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _report(name: str, measured: Measured) -> None:
    costs = (f"{part} {1e6 * cpu / measured.num_tokens:.1f}" for part, cpu in measured.cpu_s.items())
    print(
        f"{name}: {measured.num_tokens / measured.seconds:,.0f} tokens/s, "
        f"{measured.num_tokens / measured.num_events:.1f} tokens per event, "
        f"{measured.num_events / measured.seconds:,.0f} events/s; added per token: "
        f"{_spread(measured.added_s)}, after the start {_spread(measured.steady_s)}; "
        f"processor us per token: {', '.join(costs)}"
    )


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "nothing"
    return f"p50 {1e3 * _percentile(seconds, 0.5):.2f} ms, p99 {1e3 * _percentile(seconds, 0.99):.2f} ms"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a stream")
    parser.add_argument(
        "--rate", type=float, default=20000, help="tokens per second of all streams, second measurement"
    )
    parser.add_argument("--per-round", type=int, default=4, help="tokens that a stream gains at once, as with drafts")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{arguments.streams} streams of {arguments.tokens} tokens; {os.cpu_count()} cores, load {load:.1f} before")
    per_round = ("--tokens-per-round", str(arguments.per_round))
    interval = arguments.streams * arguments.per_round / arguments.rate
    for name, options in (("capacity", per_round), ("steady", (*per_round, "--interval", str(interval)))):
        with tempfile.TemporaryDirectory() as folder, serve_scripted(Path(folder), *options) as server:
            measure(server, arguments.streams, 50)  # warm
            _report(name, measure(server, arguments.streams, arguments.tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
