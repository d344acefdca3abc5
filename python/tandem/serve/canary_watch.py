"""The canary on a running server: when it is replayed, and where its results show."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tandem.serve.canary import Canary, CanaryAnswer, CanaryPrompt, CanaryResult
from tandem.serve.canary_prompts import CanaryPrompts
from tandem.serve.engine_client import EngineClient, Generation
from tandem.serve.errors import ApiError
from tandem.serve.metrics import ServerMetrics
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT

_log = logging.getLogger(__name__)

LOWEST_PRIORITY = 2**31 - 1


class CanaryWatch:
    """Replays the canary, one request at a time behind all others. Everything runs on one event loop.

    Args:
        prompts: what is replayed.
        interval_s: seconds from the end of a run to the next one.
        max_difference: accepted drafts of a prompt by which two answers may differ.
        client: the engine.
        metrics: what is told of each result.
    """

    def __init__(
        self,
        prompts: CanaryPrompts,
        interval_s: float,
        max_difference: int,
        client: EngineClient,
        metrics: ServerMetrics,
    ) -> None:
        self._prompts = prompts
        self._interval_s = interval_s
        self._client = client
        self._metrics = metrics
        self._canary = Canary(prompts.prompts, self._send, max_difference=max_difference, expected=prompts.expected)
        self._num_runs = 0
        self._skipped: str | None = None
        self._last: Sequence[CanaryResult] = ()

    async def run(self) -> None:
        """Replay until cancelled, which ends what runs; the first time as soon as the engine is ready.

        Raises:
            CanaryPromptsError: a prompt cannot be replayed on this engine.
            EngineStartError: the engine cannot be built.
        """
        ready = await self._client.wait_ready()
        self._prompts.check(
            vocab_size=ready.vocab_size,
            tokens_per_page=ready.tokens_per_page,
            max_model_len=ready.max_model_len,
        )
        _log.info("the canary's %d prompts are those of %s", len(self._prompts.prompts), self._prompts.path)
        while True:
            await self._run_once()
            await asyncio.sleep(self._interval_s)

    def state(self) -> dict[str, Any]:
        """What `/v1/stats` shows: whole runs, why the last one was left out if it was, and the last one's results."""
        return {
            "prompts": str(self._prompts.path),
            "interval_s": self._interval_s,
            "num_runs": self._num_runs,
            "skipped": self._skipped,
            "last": [
                {
                    "prompt": result.prompt,
                    "route": result.route,
                    "num_tokens": len(result.answer.token_ids),
                    "cached_tokens": result.answer.cached_tokens,
                    "num_drafted": result.answer.num_drafted,
                    "num_accepted": result.answer.num_accepted,
                    "faults": result.faults,
                    "not_compared": result.not_compared,
                }
                for result in self._last
            ],
        }

    async def _run_once(self) -> None:
        reason = self._client.unhealthy()
        if reason is None:
            try:
                results = await self._canary.run()
            except ApiError as error:
                reason = error.message
        if reason is not None:
            if self._skipped is None:
                _log.warning("the canary is left out while the engine cannot be asked: %s", reason)
            self._skipped = reason
            return
        self._skipped = None
        self._num_runs += 1
        self._last = results
        failing = {COLD: 0, PREFIX_HIT: 0}
        for result in results:
            failing[result.route] += bool(result.faults)
            if result.faults or result.not_compared is None:
                self._metrics.count_canary(result.route, failed=bool(result.faults))
        self._metrics.show_failing_canaries(failing)

    async def _send(self, prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
        """Raises an `ApiError` where the engine cannot be asked; a generation that failed is an answer."""
        # With a seed of its own, so that it takes none of those that requests without one are given in turn.
        params = {"temperature": 0.0, "max_tokens": prompt.max_tokens, "cache_salt": salt, "seed": 0}
        params |= {"priority": LOWEST_PRIORITY, "detokenize": False}
        job = self._client.submit([Generation(list(prompt.token_ids), params)], stream=False, canary=True)
        try:
            # Without streaming there is one piece, which stands for the whole answer.
            ((_, piece),) = await job.take()
        finally:
            job.abandon()
        end = piece.end
        assert end is not None
        if end.finish_reason == "error" and not self._client.died.is_set():
            return CanaryAnswer((), 0, 0, 0, 0, error=f"the generation failed: {end.error}")
        if end.token_ids is None or end.finish_reason == "abort":
            raise ApiError(503, end.error or self._client.unhealthy() or "the generation was aborted")
        return CanaryAnswer(
            tuple(end.token_ids),
            end.cached_tokens,
            end.num_rounds,
            end.num_drafted,
            end.num_accepted,
            end.num_preemptions,
        )
