"""The step loop: inbox, plan, derive, forward, sample, complete, emit.

One thread drives an engine and is the only one to touch its scheduler. Other threads leave requests and aborts in a
locked inbox. A step is launched before it is collected, and everything that the next step needs of it stays on the
device, so the next one is planned and launched while it still runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tandem.core import kv, sched
from tandem.engine.errors import EngineClosedError, InvalidParameterError, InvalidPromptError, check_token_ids
from tandem.engine.grammar import GrammarCompiler, GrammarMatcher
from tandem.engine.outputs import FinishReason
from tandem.engine.params import SamplingParams
from tandem.engine.request import Request, Sink, Taken
from tandem.engine.runner import ModelRunner, RowResult, StepInFlight, StepOutcome, StepTimes
from tandem.engine.sampling import SampleError
from tandem.engine.speculation import RoundCounts, SpeculationStats
from tandem.engine.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FINISH_REASONS: dict[sched.FinishReason, FinishReason] = {
    sched.FinishReason.STOP: "stop",
    sched.FinishReason.LENGTH: "length",
    sched.FinishReason.ABORT: "abort",
    sched.FinishReason.ERROR: "error",
}
# Codes in arrays, and members that every step looks up: access to an enumeration's member by name is slow.
_STOP, _ERROR = int(sched.FinishReason.STOP), int(sched.FinishReason.ERROR)
_NO_ERROR = SampleError.NONE
_FAILED = Taken(0, stops=False, stop_reason=None, failed=True)
_SAMPLE_ERRORS = {
    SampleError.NOT_FINITE: "the logits are not finite",
    SampleError.NOTHING_ALLOWED: "logit_bias, min_tokens and grammar forbid every token",
}


@dataclass(frozen=True)
class EngineCounters:
    """Counters since the start, and what runs now: whatever costs the same however large the pool is."""

    scheduler: sched.Stats
    times: StepTimes
    num_steps: int
    """The progress counter: grows with each completed step, failed ones included."""

    @property
    def speculation(self) -> SpeculationStats:
        """What became of drafts."""
        return SpeculationStats.of(self.scheduler)


@dataclass(frozen=True)
class EngineStats(EngineCounters):
    """The counters, and the state of every page."""

    ledger: kv.Ledger


@dataclass(frozen=True)
class _Submit:
    request: Request


@dataclass(frozen=True)
class _Abort:
    request_id: int


@dataclass(frozen=True)
class _Call:
    run: Callable[[], Any]
    future: Future[Any]


class Engine:
    """Continuous batching over one model.

    Args:
        scheduler: decides what runs in each step.
        runner: runs it.
        end_ids: ids that end a request unless it ignores them.
        tokenizer: None serves requests without text.
        seed: makes the seeds that are drawn for requests without one repeatable; None draws them at random.
    """

    def __init__(
        self,
        scheduler: sched.Scheduler,
        runner: ModelRunner,
        *,
        end_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._end_ids = frozenset(end_ids)
        self._tokenizer = tokenizer
        self._grammars = None if tokenizer is None else GrammarCompiler(tokenizer, runner.vocab_size, self._end_ids)
        self._max_tokens = scheduler.config.max_sequence_tokens
        self._steps_ahead = 1 if scheduler.config.overlap else 0
        self._request_ids = itertools.count()
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._inbox: deque[_Submit | _Abort | _Call] = deque()
        self._inbox_filled = threading.Condition()
        self._woken = False
        self._closed: BaseException | None = None
        self._by_request: dict[int, Request] = {}
        self._by_sequence: dict[int, Request] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._num_steps = 0
        self._on_step: Callable[[EngineCounters], None] | None = None

    # From any thread.

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        prompt: str | None = None,
        stream: bool = False,
    ) -> int:
        """Check a request and put it in the inbox; returns its id.

        Args:
            prompt_ids: at least one id, all in the vocabulary.
            params: how to sample.
            sink: called on the engine thread with each `Delta`; must not block or raise.
            prompt: the prompt's text, to be given back with the output.
            stream: whether deltas before the last are wanted.

        Raises:
            InvalidPromptError: the prompt is empty, leaves no room below the limit, or holds unknown ids.
            InvalidTokenIdError: the parameters hold unknown ids.
            InvalidParameterError: the grammar is malformed.
            EngineClosedError: the engine takes no more requests.
        """
        ids = [int(i) for i in prompt_ids]
        grammar = self._checked_grammar(ids, params)
        room = self._max_tokens - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        own_ends = frozenset() if params.ignore_eos else self._end_ids
        request = Request(
            next(self._request_ids),
            prompt,
            ids,
            params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            end_ids=own_ends.union(params.stop_token_ids),
            tokenizer=self._tokenizer,
            sink=sink,
            stream=stream,
            grammar=grammar,
        )
        self._put(_Submit(request))
        return request.request_id

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `submit` would raise, without submitting."""
        self._checked_grammar(prompt_ids, params)

    def _checked_grammar(self, prompt_ids: Sequence[int], params: SamplingParams) -> GrammarMatcher | None:
        """Check a request; the start of its grammar, if it has one."""
        if not prompt_ids:
            raise InvalidPromptError("the prompt is empty; at least one token is needed")
        if len(prompt_ids) >= self._max_tokens:
            config = self._scheduler.config
            raise InvalidPromptError(
                f"the prompt has {len(prompt_ids)} tokens; allowed are at most {self._max_tokens - 1}, so that one can "
                f"be generated (max_model_len is {config.max_model_len}, the pool holds "
                f"{config.num_slots * config.tokens_per_page} tokens)"
            )
        check_token_ids("the prompt", prompt_ids, self._runner.vocab_size)
        params.check_vocabulary(self._runner.vocab_size)
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidParameterError("grammar", params.grammar, "None in an engine without a tokenizer")
        return self._grammars.matcher(params.grammar)

    def abort(self, request_id: int) -> None:
        """End a request soon; without effect where it has ended, as all have once the engine was closed."""
        with contextlib.suppress(EngineClosedError):
            self._put(_Abort(request_id))

    def call(self, run: Callable[[], _T]) -> Future[_T]:
        """Have the engine thread call ``run`` between two steps."""
        future: Future[_T] = Future()
        self._put(_Call(run, future))
        return future

    def _put(self, item: _Submit | _Abort | _Call) -> None:
        with self._inbox_filled:
            if self._closed is not None:
                raise EngineClosedError(f"the engine takes no more requests: {self._closed}") from self._closed
            self._inbox.append(item)
            self._inbox_filled.notify()

    def wake(self) -> None:
        """End the wait of `wait_for_work`, now and ever after."""
        with self._inbox_filled:
            self._woken = True
            self._inbox_filled.notify()

    @property
    def num_steps(self) -> int:
        """The progress counter: an engine with work whose counter stands still is not healthy."""
        return self._num_steps

    # From the engine thread.

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Block until there is something to do; whether there is."""
        if self._by_request or self._in_flight:
            return True
        with self._inbox_filled:
            return self._inbox_filled.wait_for(lambda: bool(self._inbox) or self._woken, timeout)

    def step(self) -> bool:
        """Take the inbox, launch the next step and complete the oldest one that is due; whether anything was done."""
        self._take_inbox()
        start = time.perf_counter()
        plan = self._scheduler.plan() if len(self._in_flight) <= self._steps_ahead else None
        self._runner.times.plan += time.perf_counter() - start
        if plan is not None:
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._steps_ahead):
            self._complete(self._in_flight[0])
            return True
        return plan is not None

    def stats(self) -> EngineStats:
        """A snapshot; looks at every page of the pool."""
        return EngineStats(**vars(self.counters()), ledger=self._scheduler.ledger())

    def counters(self) -> EngineCounters:
        """The part of a snapshot that may be taken in every step."""
        return EngineCounters(self._scheduler.stats(), dataclasses.replace(self._runner.times), self._num_steps)

    def observe_steps(self, on_step: Callable[[EngineCounters], None] | None) -> None:
        """Call ``on_step`` with the counters after each step that completed or failed; it must not block or raise."""
        self._on_step = on_step

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._scheduler.reset_prefix_cache()

    def close(self, cause: BaseException | None = None) -> None:
        """Take no more requests, end those that run (aborted, or with ``cause`` as their error), wait for the steps.

        Nothing is held afterwards: no page, no thread.
        """
        with self._inbox_filled:
            if self._closed is not None:
                return
            self._closed = cause or EngineClosedError("it was closed")
            left, self._inbox = list(self._inbox), deque()
            self._inbox_filled.notify_all()
        requests = list(self._by_request.values())
        for item in left:
            if isinstance(item, _Submit):
                requests.append(item.request)
            elif isinstance(item, _Call):
                item.future.set_exception(self._closed)
        for request in requests:
            if cause is not None:
                request.fail(f"the engine stopped: {cause}")
            request.finish("abort" if cause is None else "error", num_new=0, cached_tokens=0, num_preemptions=0)
        self._runner.close()
        for seq_id in self._by_sequence:
            self._scheduler.abort(seq_id)
        stats = self._scheduler.stats()
        for step_id in range(stats.num_completed_steps + stats.num_failed_steps, stats.num_planned_steps):
            self._scheduler.fail(step_id)
        self._in_flight.clear()
        self._by_request.clear()
        self._by_sequence.clear()

    def _take_inbox(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case _Submit(request):
                    self._admit(request)
                case _Abort(request_id):
                    self._abort_now(request_id)
                case _Call(run, future):
                    _run_call(run, future)

    def _admit(self, request: Request) -> None:
        params = request.params
        spec = sched.RequestSpec(
            prompt=np.array(request.prompt_ids, dtype=np.int32),
            max_tokens=request.max_tokens,
            priority=params.priority,
            salt=_salt(request),
            speculate=params.speculate,
            synchronous=request.grammar is not None,
        )
        try:
            request.seq_id = self._scheduler.submit(spec)
        # It concerns this request alone, which the scheduler then knows nothing of.
        except Exception as error:
            _log.exception("request %d failed", request.request_id)
            request.fail(_describe(error))
            request.finish("error", num_new=0, cached_tokens=0, num_preemptions=0)
            return
        self._by_request[request.request_id] = request
        self._by_sequence[request.seq_id] = request

    def _abort_now(self, request_id: int) -> None:
        request = self._by_request.get(request_id)
        if request is None:
            return
        terminal = self._scheduler.abort(request.seq_id)
        assert terminal is not None
        self._end(terminal, num_new=0)

    def _launch(self, plan: sched.StepPlan) -> None:
        start = time.perf_counter()
        try:
            self._in_flight.append(self._runner.launch(plan, self._by_sequence))
            self._runner.times.launch += time.perf_counter() - start
        # As in `_complete`, where a step fails that was launched.
        except Exception as error:
            while self._in_flight:
                self._complete(self._in_flight[0])
            self._fail_step(plan, error)

    def _complete(self, step: StepInFlight) -> None:
        """Take the result of the oldest step in flight: pass on what its requests gain, or that it failed."""
        start = time.perf_counter()
        try:
            outcome = self._runner.collect(step)
        # Whatever a model, a kernel or the allocator raises concerns the rows of this step; the loop goes on.
        except Exception as error:
            self._fail_step(step.plan, error)
        else:
            collected = time.perf_counter()
            self._apply(step, outcome)
            self._num_steps += 1
            self._runner.times.wait += collected - start
            self._runner.times.output += time.perf_counter() - collected
            self._report_step()
        self._in_flight.popleft()

    def _report_step(self) -> None:
        if self._on_step is not None:
            self._on_step(self.counters())

    def _fail_step(self, plan: sched.StepPlan, error: Exception) -> None:
        _log.error("step %d failed", plan.step_id, exc_info=error)
        events = self._scheduler.fail(plan.step_id)
        self._num_steps += 1
        for terminal in events.terminals:
            self._by_sequence[terminal.seq_id].fail(_describe(error))
            self._end(terminal, num_new=0)
        self._report_step()

    def _take(self, request: Request, result: RowResult) -> Taken:
        """Cut a row at its request's end."""
        if result.error is not _NO_ERROR:
            request.fail(_SAMPLE_ERRORS[result.error])
            return _FAILED
        try:
            return request.take(result.tokens)
        # Whatever the text of one request brings about does not concern its neighbours.
        except Exception as error:
            _log.exception("request %d failed", request.request_id)
            request.fail(_describe(error))
            return _FAILED

    def _apply(self, step: StepInFlight, outcome: StepOutcome) -> None:
        """Cut each row at its request's end, report to the scheduler, and pass on what it keeps."""
        for part in outcome.prompt_logprobs:
            part.request.set_prompt_logprobs(part.first_index, part.entries)
        results = outcome.rows
        taken = [self._take(request, result) for request, result in zip(step.requests, results, strict=True)]
        finish = np.zeros(len(results), dtype=np.int32)
        for i, row in enumerate(taken):
            if row.failed:
                finish[i] = _ERROR
            elif row.stops:
                finish[i] = _STOP
        num_tokens = np.array([row.num_tokens for row in taken], dtype=np.int32)
        accepted = np.array([min(r.num_accepted, t.num_tokens) for r, t in zip(results, taken, strict=True)], np.int32)
        kept = [result.tokens[: row.num_tokens] for result, row in zip(results, taken, strict=True)]
        tokens = np.array(list(itertools.chain.from_iterable(kept)), dtype=np.int32)
        events = self._scheduler.complete(sched.StepResult(step.plan.step_id, num_tokens, accepted, tokens, finish))
        num_kept = events.num_tokens.tolist()
        ended = events.finish.tolist()
        for i, request in enumerate(step.requests):
            if taken[i].failed:
                continue
            # A row whose sequence ended or was preempted since its launch keeps nothing.
            request.settle(results[i].tokens, taken[i], num_kept[i], results[i].logprobs, results[i].drafts)
            if num_kept[i] and not ended[i]:
                request.emit(num_kept[i])
        new_of = dict(zip(events.seq_id.tolist(), num_kept, strict=True))
        for terminal in events.terminals:
            self._end(terminal, num_new=new_of.get(terminal.seq_id, 0))

    def _end(self, terminal: sched.Terminal, *, num_new: int) -> None:
        """The one terminal event of a request."""
        request = self._by_sequence.pop(terminal.seq_id)
        del self._by_request[request.request_id]
        request.finish(
            FINISH_REASONS[terminal.reason],
            num_new=num_new,
            cached_tokens=terminal.num_cached_tokens,
            num_preemptions=terminal.num_preemptions,
            rounds=RoundCounts.of_request(terminal),
        )


def _salt(request: Request) -> str:
    """The prefix-cache namespace of a request.

    One that wants the log-probabilities of its prompt has a namespace of its own: it must find nothing cached.
    """
    if request.params.prompt_logprobs is not None:
        return f"request {request.request_id}"
    return "" if request.params.cache_salt is None else f"salt {request.params.cache_salt}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _run_call(run: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(run())
    # The caller's function may raise anything; it is raised again where the caller waits.
    except Exception as error:
        future.set_exception(error)
