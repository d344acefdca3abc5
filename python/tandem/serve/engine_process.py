"""The engine process: takes requests from the channel, runs them, and sends back what they gain.

It reads its configuration as one JSON line from standard input and ends when standard input does: the other side holds
the pipe open for as long as it lives, so its death is seen at once, however it came.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from io import FileIO
from typing import Protocol, TypeVar

import msgspec
import zmq

from tandem.engine.errors import EngineClosedError, InvalidParameterError, InvalidPromptError
from tandem.engine.outputs import Delta, RequestOutput, TokenLogprobs
from tandem.engine.params import SamplingParams
from tandem.serve import messages
from tandem.serve.messages import (
    Abort,
    Beat,
    End,
    Failed,
    GetStats,
    LogprobEntry,
    Piece,
    Ready,
    StatsReply,
    Submit,
    params_of,
)
from tandem.serve.metrics_snapshot import Snapshot
from tandem.serve.options import EngineConfig
from tandem.serve.outbox import Outbox
from tandem.serve.steps import StepRecorder, StepWindow

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

BEAT_S = 0.2
# Messages that zmq holds per direction; behind a full channel the outbox joins pieces.
HIGH_WATER = 64
EXIT_ENGINE_STOPPED = 1


class ServedEngine(Protocol):
    """What serving asks of an engine: the calls of `Engine` that are open to any thread."""

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, sink: Callable[[Delta], None], *, stream: bool
    ) -> int:
        """Start a request; returns the engine's number for it."""

    def abort(self, request_id: int) -> None:
        """End a request soon."""

    def call(self, run: Callable[[], _T]) -> Future[_T]:
        """Have the engine thread call something."""

    @property
    def num_steps(self) -> int:
        """The progress counter."""


@dataclass(frozen=True)
class BuiltForServing:
    """An engine with what the HTTP process must know of it; ``stats`` and ``on_output`` run on the engine thread.

    ``on_output`` is told of each request of the traffic that has ended; ``steps`` has the records of the last steps.
    """

    engine: ServedEngine
    ready: Ready
    stats: Callable[[], Snapshot]
    on_output: Callable[[RequestOutput], None]
    steps: StepWindow
    close: Callable[[], None]


Build = Callable[[EngineConfig], BuiltForServing]


class EngineServer:
    """Passes requests from the channel to an engine, and deltas back.

    Args:
        built: the engine.
        commands: socket of type PULL.
        outbox: takes what goes to the HTTP process.
    """

    def __init__(self, built: BuiltForServing, commands: zmq.Socket[bytes], outbox: Outbox) -> None:
        self._engine = built.engine
        self._stats = built.stats
        self._on_output = built.on_output
        self._steps = built.steps
        self._commands = commands
        self._outbox = outbox
        # The engine's number of a request by the HTTP process's. Touched by this thread alone: the engine thread only
        # notes which requests have ended.
        self._engine_ids: dict[int, int] = {}
        self._ended: deque[int] = deque()
        self._pulse: Future[None] | None = None

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            EngineClosedError: the engine has stopped by itself.
        """
        next_beat = time.monotonic()
        while True:
            wait_ms = max(0, math.ceil((next_beat - time.monotonic()) * 1000))
            if self._commands.poll(wait_ms) and not self._take(messages.decode_to_engine(self._commands.recv())):
                return
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()
            while self._ended:
                del self._engine_ids[self._ended.popleft()]

    def _take(self, message: messages.ToEngine) -> bool:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                engine_id = self._engine_ids.get(request_id)
                if engine_id is not None:
                    self._engine.abort(engine_id)
            case GetStats():
                self._engine.call(lambda: self._outbox.put(self._reply(message)))
            case messages.Stop():
                return False
        return True

    def _submit(self, message: Submit) -> None:
        def sink(delta: Delta) -> None:
            self._outbox.put_piece(piece_of(message, delta))
            if delta.output is not None:
                self._ended.append(message.request_id)
                if not message.canary:
                    self._on_output(delta.output)

        try:
            params = params_of(message.params)
            engine_id = self._engine.submit(message.prompt_ids, params, sink, stream=message.stream)
            self._engine_ids[message.request_id] = engine_id
        except (InvalidParameterError, InvalidPromptError) as error:
            param = error.field if isinstance(error, InvalidParameterError) else None
            end = End("error", cached_tokens=0, error=str(error), refused=True, param=param)
            self._outbox.put_piece(Piece(message.request_id, "", 0, end=end))

    def _reply(self, asked: GetStats) -> StatsReply:
        steps = None
        if asked.steps != "none":
            steps = self._steps.drain() if asked.steps == "drain" else self._steps.read()
        return StatsReply(asked.call_id, self._stats(), steps)

    def _beat(self) -> None:
        """Raises `EngineClosedError` where the engine has stopped."""
        if self._pulse is None or self._pulse.done():
            self._pulse = self._engine.call(lambda: None)
        self._outbox.put(Beat(self._engine.num_steps))


def piece_of(asked: Submit, delta: Delta) -> Piece:
    """What a delta says; without streaming the only one stands for the whole output."""
    output = delta.output
    end = None if output is None else _end_of(output, with_tokens=asked.canary)
    if output is None or asked.stream:
        return Piece(asked.request_id, delta.text, len(delta.token_ids), _entries(delta.logprobs), end)
    return Piece(asked.request_id, output.text, output.completion_tokens, _entries(output.logprobs), end)


def _end_of(output: RequestOutput, *, with_tokens: bool) -> End:
    prompt = output.prompt_logprobs
    return End(
        output.finish_reason,
        cached_tokens=output.cached_tokens,
        stop_reason=output.stop_reason,
        error=output.error,
        num_preemptions=output.num_preemptions,
        scheduled_s=output.timings.scheduled,
        first_token_s=output.timings.first_token,
        total_s=output.timings.total,
        prompt_logprobs=None if prompt is None else [None if entry is None else _entry(entry) for entry in prompt],
        num_rounds=output.rounds.num_rounds,
        num_drafted=output.rounds.num_drafted,
        num_accepted=output.rounds.num_accepted,
        token_ids=output.token_ids if with_tokens else None,
    )


def _entry(entry: TokenLogprobs) -> LogprobEntry:
    return entry.token_id, entry.logprob, entry.top


def _entries(logprobs: list[TokenLogprobs] | None) -> list[LogprobEntry] | None:
    return None if logprobs is None else [_entry(entry) for entry in logprobs]


def build_for_serving(config: EngineConfig) -> BuiltForServing:
    """Load the model that the configuration names."""
    from tandem.engine.llm import LLM
    from tandem.serve.alarm import AcceptanceAlarm
    from tandem.serve.alarm_feed import expected_acceptance, report_request, with_alarms
    from tandem.serve.engine_stats import snapshot_of
    from tandem.spec.damage import misread_drafts

    fields = msgspec.structs.asdict(config)
    given, damaged = fields.pop("acceptance_baseline"), fields.pop("damage_drafts")
    llm = LLM(**fields, wrap_attention=misread_drafts if damaged else None)
    limits = llm.limits
    ready = Ready(
        vocab_size=llm.config.vocab_size,
        max_prompt_tokens=limits.max_model_len - 1,
        max_model_len=limits.max_model_len,
        tokens_per_page=limits.tokens_per_page,
        load_seconds=llm.load_seconds,
    )
    baseline = None if given is None else expected_acceptance(given[0], given[1], limits.max_draft_len)
    engine, watch, steps = llm.engine, AcceptanceAlarm(baseline), StepWindow()

    def stats() -> Snapshot:
        return with_alarms(snapshot_of(engine.stats()), watch)

    def on_output(output: RequestOutput) -> None:
        if limits.max_draft_len > 0:
            report_request(watch, output, limits.max_draft_len)

    engine.call(lambda: engine.observe_steps(StepRecorder(steps, engine.counters()))).result()
    return BuiltForServing(engine, ready, stats, on_output, steps, llm.close)


def serve_engine(build: Build, addresses: tuple[str, str]) -> int:
    """Build an engine and serve it; returns the exit code.

    Args:
        build: makes the engine.
        addresses: of the socket that commands come from, and of the one that everything else goes to.
    """
    # Ending is the HTTP process's decision: a signal for the whole process group must not cut off its requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Without a buffer, whose lock the interpreter's end would wait for while the thread below reads.
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    config = msgspec.json.decode(stdin.readline(), type=EngineConfig)
    threading.Thread(target=_end_with, args=(stdin,), name="tandem-parent-watch", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.setsockopt(zmq.RCVHWM, HIGH_WATER)
    events.setsockopt(zmq.SNDHWM, HIGH_WATER)
    commands.connect(addresses[0])
    events.connect(addresses[1])
    outbox = Outbox(events)
    try:
        built = build(config)
    # Whatever keeps the engine from being built is reported where the user looks: in the other process.
    except Exception as error:
        mistake = isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "tandem"
        if not mistake:
            _log.exception("the engine cannot be built")
        outbox.put(Failed(f"{error}" if mistake else f"{type(error).__name__}: {error}", mistake))
        outbox.close()
        context.term()
        return EXIT_ENGINE_STOPPED
    # The model's objects stay: looking through them again for garbage would hold up a step for tens of milliseconds.
    gc.collect()
    gc.freeze()
    outbox.put(built.ready)
    code = 0
    try:
        EngineServer(built, commands, outbox).run()
    except EngineClosedError as error:
        _log.error("%s", error)
        code = EXIT_ENGINE_STOPPED
    built.close()
    outbox.close()
    commands.close()
    context.term()
    return code


def _end_with(stdin: FileIO) -> None:
    """Nobody is left to answer to when the HTTP process has died; nothing here is worth saving then."""
    try:
        while stdin.read(1):
            pass
    finally:  # reading may fail as well when the other end is gone
        os._exit(EXIT_ENGINE_STOPPED)


def main() -> int:
    """Serve a model; the arguments are the two addresses."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    return serve_engine(build_for_serving, (sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    # A thread still waits for standard input; ending the interpreter around it would only print what it cannot free.
    os._exit(exit_code)
