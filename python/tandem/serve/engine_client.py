"""The HTTP process's side: starts the engine process, hands it requests, and passes on what they gain."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tandem.serve import messages
from tandem.serve.errors import ApiError, EngineStartError, bad_request
from tandem.serve.messages import (
    Abort,
    Beat,
    End,
    Failed,
    FromEngine,
    GetStats,
    Piece,
    Pieces,
    Ready,
    StatsReply,
    StepsWanted,
)
from tandem.serve.metrics import RequestTimings
from tandem.serve.options import ServerOptions

_log = logging.getLogger(__name__)

# Messages that zmq holds per direction.
HIGH_WATER = 64
# How long a process that was told to stop may take; it aborts what runs and frees its memory in that time.
_STOP_S = 10.0
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Generation:
    """One request to the engine: a prompt, and keyword arguments of `SamplingParams`."""

    prompt_ids: list[int]
    params: dict[str, Any]


class Job:
    """The generations that one HTTP request runs; made by `EngineClient.submit`.

    What they gain is joined until it is taken, so a reader that is slow costs at most the text that its own requests
    may have.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[int]) -> None:
        self._client = client
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._pieces: dict[int, Piece] = {}
        self._arrived = asyncio.Event()
        self._abandoned = False
        self.num_unfinished = len(request_ids)

    async def take(self) -> list[tuple[int, Piece]]:
        """What the generations gained since the last call, by their place in the submission; waits for something.

        A generation's last piece has its `End`.
        """
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pieces = self._pieces, {}
        taken = [(self._index[request_id], piece) for request_id, piece in pieces.items()]
        self.num_unfinished -= sum(piece.end is not None for _, piece in taken)
        return taken

    def put(self, piece: Piece) -> None:
        """Add what a generation gained."""
        if self._abandoned:
            return
        waiting = self._pieces.get(piece.request_id)
        if waiting is None:
            self._pieces[piece.request_id] = piece
        else:
            waiting.append(piece)
        self._arrived.set()

    def abandon(self) -> None:
        """Nobody reads any more: end what still runs. Without effect where everything has ended."""
        self._abandoned = True
        self._pieces.clear()
        self._client.abort(self._index)


@dataclass
class _Unfinished:
    """A generation that runs or waits."""

    job: Job
    prompt_tokens: int
    canary: bool
    num_tokens: int = 0

    def timings(self, end: End) -> RequestTimings:
        return RequestTimings(
            finish_reason=end.finish_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.num_tokens,
            scheduled_s=end.scheduled_s,
            first_token_s=end.first_token_s,
            total_s=end.total_s,
        )


class EngineClient:
    """The engine process as the HTTP process sees it. Everything runs on one event loop.

    Args:
        options: which engine, and how many generations it may have at once.
        on_end: called with each generation that the engine ran and ended, but for canaries.
    """

    def __init__(self, options: ServerOptions, on_end: Callable[[RequestTimings], None]) -> None:
        self._options = options
        self._on_end = on_end
        self._request_ids = itertools.count()
        self._unfinished: dict[int, _Unfinished] = {}
        self._num_canaries = 0
        self._calls: dict[int, asyncio.Future[StatsReply]] = {}
        self._outgoing: asyncio.Queue[messages.ToEngine] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._process: Process | None = None
        self._folder: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._last_steps = 0
        self._last_progress = time.monotonic()
        self._last_beat = time.monotonic()
        self.ready: Ready | None = None
        self.died = asyncio.Event()
        self.draining = False
        self.ending = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Life.

    async def start(self) -> None:
        """Start the process; it is of use once `wait_ready` returns."""
        self._folder = tempfile.mkdtemp(prefix="tandem-")
        addresses = [f"ipc://{self._folder}/{name}" for name in ("commands", "events")]
        self._context = zmq.asyncio.Context()
        commands, events = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        commands.setsockopt(zmq.SNDHWM, HIGH_WATER)
        events.setsockopt(zmq.RCVHWM, HIGH_WATER)
        commands.bind(addresses[0])
        events.bind(addresses[1])
        self._started = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._options.engine_command, *addresses, stdin=PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._options.engine) + b"\n")
        self._tasks = [
            asyncio.create_task(self._send(commands)),
            asyncio.create_task(self._receive(events)),
            asyncio.create_task(self._watch(self._process)),
        ]

    async def wait_ready(self) -> Ready:
        """Wait until the engine can take requests.

        Raises:
            EngineStartError: it cannot be built, or its process died.
        """
        assert self._started is not None
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """End the process, aborting what runs, and clean up."""
        assert self._process is not None
        if self._process.returncode is None:
            self._outgoing.put_nowait(messages.Stop())
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S if self.ready is not None else 0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._context is not None
        self._context.destroy(linger=0)
        assert self._folder is not None
        shutil.rmtree(self._folder)

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, and let what runs end; what still does after ``grace_s`` is aborted."""
        self.draining = True
        self.ending.set()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            _log.warning("%d generations are aborted after %g s of grace", len(self._unfinished), grace_s)
            self.abort(self._unfinished)

    def unhealthy(self) -> str | None:
        """Why the engine should get no requests now; None where it may."""
        now, stall_s = time.monotonic(), self._options.stall_s
        if self.died.is_set():
            return "the engine process has died"
        if self.ready is None:
            return "the model is being loaded"
        if self.draining:
            return "the server is shutting down"
        if now - self._last_beat > stall_s:
            return f"the engine process has not been heard of for {now - self._last_beat:.1f} s"
        if self._unfinished and now - self._last_progress > stall_s:
            waited_s = now - self._last_progress
            return f"the engine has {len(self._unfinished)} requests and made no progress for {waited_s:.1f} s"
        return None

    def not_ready(self) -> ApiError:
        """The answer to a request that the engine cannot take."""
        return ApiError(503, self.unhealthy() or "", code="not_ready", retry_after_s=RETRY_AFTER_S)

    # Requests.

    @property
    def num_unfinished(self) -> int:
        """Generations that run or wait, those included whose client has gone but whose end has not come yet."""
        return len(self._unfinished)

    def submit(self, generations: Sequence[Generation], *, stream: bool, canary: bool = False) -> Job:
        """Run generations, all or none. Canaries take nobody's place in the queue and are not observed.

        Raises:
            ApiError: there are too many at once (429), or the engine takes none (503).
        """
        most = self._options.max_requests
        if len(generations) > most:
            raise bad_request(f"the request asks for {len(generations)} generations; at most {most} run at once")
        if self.ready is None or self.draining or self.died.is_set():
            raise self.not_ready()
        running = len(self._unfinished) - self._num_canaries
        if not canary and running + len(generations) > most:
            raise ApiError(
                429,
                f"{running} generations run or wait, at most {most} may; try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        ids = [next(self._request_ids) for _ in generations]
        job = Job(self, ids)
        if not self._unfinished:
            self._last_progress = time.monotonic()
            self._idle.clear()
        for request_id, generation in zip(ids, generations, strict=True):
            self._unfinished[request_id] = _Unfinished(job, len(generation.prompt_ids), canary)
            self._num_canaries += canary
            message = messages.Submit(request_id, generation.prompt_ids, generation.params, stream, canary)
            self._outgoing.put_nowait(message)
        return job

    def abort(self, request_ids: Sequence[int] | dict[int, Any]) -> None:
        """End those of the generations that still run."""
        for request_id in request_ids:
            if request_id in self._unfinished:
                self._outgoing.put_nowait(Abort(request_id))

    async def stats(self, steps: StepsWanted = "none") -> StatsReply:
        """The engine's counters, and its records of steps if wanted; waits for the end of the step that runs.

        Raises:
            ApiError: the engine is not there (503).
        """
        if self.ready is None or self.died.is_set():
            raise self.not_ready()
        call_id = next(self._request_ids)
        future: asyncio.Future[StatsReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._outgoing.put_nowait(GetStats(call_id, steps))
        try:
            return await future
        finally:
            del self._calls[call_id]

    # Tasks.

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send(messages.encode(await self._outgoing.get()))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        assert self._started is not None
        while True:
            data = await socket.recv()
            assert isinstance(data, bytes)
            self._dispatch(messages.decode_from_engine(data), self._started)

    def _dispatch(self, message: FromEngine, started: asyncio.Future[Ready]) -> None:
        match message:
            case Pieces(pieces):
                self._last_progress = time.monotonic()
                for piece in pieces:
                    self._deliver(piece)
            case Beat(num_steps):
                self._last_beat = time.monotonic()
                if num_steps != self._last_steps:
                    self._last_steps, self._last_progress = num_steps, self._last_beat
            case StatsReply(call_id):
                waiting = self._calls.get(call_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Ready():
                self.ready = message
                self._last_beat = time.monotonic()
                started.set_result(message)
            case Failed(text):
                started.set_exception(EngineStartError(text))

    def _deliver(self, piece: Piece) -> None:
        unfinished = self._unfinished[piece.request_id]
        unfinished.num_tokens += piece.num_tokens
        if piece.end is not None:
            del self._unfinished[piece.request_id]
            self._num_canaries -= unfinished.canary
            if not self._unfinished:
                self._idle.set()
            if not (piece.end.refused or unfinished.canary):
                self._on_end(unfinished.timings(piece.end))
        unfinished.job.put(piece)

    async def _watch(self, process: Process) -> None:
        code = await process.wait()
        # What it sent before its end is on the way still.
        await asyncio.sleep(0.05)
        self.died.set()
        self.ending.set()
        text = f"the engine process ended with code {code}"
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError(f"{text} while it was loading the model"))
        for request_id in deque(self._unfinished):
            self._deliver(Piece(request_id, "", 0, end=End("error", cached_tokens=0, error=text)))
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(ApiError(503, text, code="engine_died"))
