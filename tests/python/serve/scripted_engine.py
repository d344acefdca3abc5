"""An engine without a model, which costs next to nothing: it says what its prompt tells it to.

A prompt is a text of words `key=value` (`Script`), values in percent encoding; without any, the reply is "abc" over and
over up to `max_tokens`.
"""

import argparse
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote

from tandem.engine.errors import EngineClosedError
from tandem.engine.outputs import Delta, FinishReason, RequestOutput, Timings
from tandem.engine.params import SamplingParams
from tandem.engine.speculation import RoundCounts
from tandem.serve.engine_process import BuiltForServing, serve_engine
from tandem.serve.messages import Ready
from tandem.serve.metrics_snapshot import Snapshot
from tandem.serve.options import EngineConfig
from tandem.serve.steps import StepWindow
from tests.python.engine.byte_tokenizer import SPECIALS

VOCAB_SIZE = 300
MAX_MODEL_LEN = 4096
TOKENS_PER_PAGE = 4
_T = TypeVar("_T")


@dataclass
class Script:
    """``word``: what each token says. ``fail_after``: tokens before an error. ``die_after``: tokens before the engine's
    thread ends. ``stall_after``: tokens before the whole engine stands still for ``stall_s``. ``stamp``: each token
    says the time instead, in nanoseconds of the monotonic clock. ``spell``: the reply, a character a token, then its
    end.
    """

    word: str = "abc"
    fail_after: int = -1
    die_after: int = -1
    stall_after: int = -1
    stall_s: float = 0.0
    stamp: int = 0
    spell: str = ""

    def says(self, first: int, count: int) -> str:
        """What the tokens from ``first`` on say."""
        if self.spell:
            return self.spell[first : first + count]
        return f"{time.monotonic_ns()} " * count if self.stamp else self.word * count

    @classmethod
    def of(cls, prompt_ids: Sequence[int]) -> "Script":
        text = bytes(i - len(SPECIALS) for i in prompt_ids if i >= len(SPECIALS)).decode()
        pairs = [word.split("=", 1) for word in text.split() if "=" in word]
        kinds = {name: type(value) for name, value in vars(cls()).items()}
        return cls(**{name: kinds[name](unquote(value)) for name, value in pairs if name in kinds})


@dataclass
class Running:
    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[Delta], None]
    stream: bool
    script: Script
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)


class ScriptedEngine:
    """Runs all requests in rounds of ``tokens_per_round`` tokens each, one every ``interval_s`` seconds."""

    def __init__(self, tokens_per_round: int, interval_s: float) -> None:
        self._tokens_per_round = tokens_per_round
        self._interval_s = interval_s
        self._inbox: deque[Running | int | Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._running: dict[int, Running] = {}
        self._next_id = 0
        self._num_aborted = 0
        self._salts = set[str]()
        self.num_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, sink: Callable[[Delta], None], *, stream: bool
    ) -> int:
        self._next_id += 1
        ids = list(prompt_ids)
        self._put(Running(self._next_id, ids, params, sink, stream, Script.of(ids)))
        return self._next_id

    def abort(self, request_id: int) -> None:
        self._put(request_id)

    def call(self, run: Callable[[], _T]) -> Future[_T]:
        if not self._thread.is_alive():
            raise EngineClosedError("the engine's thread has ended")
        future: Future[_T] = Future()
        self._put(lambda: future.set_result(run()))
        return future

    def stats(self) -> Snapshot:
        counters = dict.fromkeys(Snapshot.__struct_fields__, 0) | {
            "running": len(self._running),
            "steps": self.num_steps,
            "finished": {"abort": self._num_aborted},
            "pages": dict.fromkeys(("free", "cached", "held", "leased", "total"), 0),
            "step_seconds": {},
            "rounds": {},
            "alarms": {},
        }
        return Snapshot.from_dict(counters)

    def _put(self, item: Running | int | Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(item)
            self._changed.notify()

    def _run(self) -> None:
        next_round = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._running)
                items, self._inbox = self._inbox, deque()
            for item in items:
                if isinstance(item, Running):
                    self._running[item.request_id] = item
                elif isinstance(item, int):
                    if item in self._running:
                        self._end(self._running[item], "abort", [])
                else:
                    item()
            if not self._running:
                continue
            for running in list(self._running.values()):
                if len(running.token_ids) == running.script.die_after:
                    return
                self._advance(running)
            self.num_steps += 1
            next_round = max(next_round + self._interval_s, time.monotonic())
            time.sleep(max(0.0, next_round - time.monotonic()))

    def _advance(self, running: Running) -> None:
        script, done = running.script, len(running.token_ids)
        if done == script.stall_after:
            time.sleep(script.stall_s)
        if done == script.fail_after:
            self._end(running, "error", [])
            return
        most = MAX_MODEL_LEN if running.params.max_tokens is None else running.params.max_tokens
        if script.spell:
            most = min(most, len(script.spell))
        marks = [m for m in (script.stall_after, script.fail_after, script.die_after) if m > done]
        count = min([self._tokens_per_round, most - done, *(mark - done for mark in marks)])
        new = [7] * count
        running.token_ids += new
        if len(running.token_ids) >= most:
            self._end(running, "stop" if most == len(script.spell) else "length", new)
        elif running.stream:
            running.sink(Delta(running.request_id, script.says(done, count), new))

    def _cached_tokens(self, running: Running) -> int:
        """A salt is remembered, whatever its prompt was."""
        salt = running.params.cache_salt
        if salt is None:
            return 0
        known = salt in self._salts
        self._salts.add(salt)
        return TOKENS_PER_PAGE if known else 0

    def _end(self, running: Running, reason: FinishReason, new: list[int]) -> None:
        del self._running[running.request_id]
        self._num_aborted += reason == "abort"
        says, total = running.script.says, len(running.token_ids)
        output = RequestOutput(
            request_id=running.request_id,
            prompt=None,
            prompt_token_ids=running.prompt_ids,
            text="" if running.stream else says(0, total),
            token_ids=running.token_ids,
            cached_tokens=self._cached_tokens(running),
            finish_reason=reason,
            rounds=RoundCounts(total, 3 * total, 0),
            error="the script says so" if reason == "error" else None,
            timings=Timings(0.0, 0.0, time.perf_counter() - running.start),
        )
        running.sink(Delta(running.request_id, says(total - len(new), len(new)), new, output=output))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens-per-round", type=int, default=1)
    parser.add_argument("--interval", type=float, default=0.0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--refuse-to-load", action="store_true")
    parser.add_argument("addresses", nargs=2)
    arguments = parser.parse_args()

    def build(config: EngineConfig) -> BuiltForServing:
        time.sleep(arguments.load_seconds)
        if arguments.refuse_to_load:
            raise OSError(f"{config.model} is not a model")
        engine = ScriptedEngine(arguments.tokens_per_round, arguments.interval)
        ready = Ready(VOCAB_SIZE, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, TOKENS_PER_PAGE, 0.0)
        return BuiltForServing(engine, ready, engine.stats, lambda output: None, StepWindow(), lambda: None)

    return serve_engine(build, (arguments.addresses[0], arguments.addresses[1]))


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
