"""The canary: fixed prompts replayed through every route, compared token by token and in acceptance.

Traffic changes; the canary's prompts do not. They are greedy and live under a cache salt of their own, so that nobody
else's pages answer for them and theirs answer for nobody else. One run of a prompt sends it twice: under a salt that
was never used, which makes it cold, and once more under the same salt, which makes it a prefix hit. Each further route
is a way of sending that the caller gives.

- Tokens of every route must equal the expected ones: those of the first cold run, or of a file.
- On a route, drafts must be accepted as often as on the cold route of the same run: same tokens, same drafts (design,
  3.5), so on one machine with batch-invariant arithmetic the two are equal. Elsewhere rounding may turn a near tie, so
  `max_difference` accepted drafts of the whole run may differ.
- The cold route's rate must not fall below the expected one by more than ``max_difference`` likewise.

Neighbours can take from a replay what is to be compared: its seat, its pages, its drafts. What was left out then is
said with the result, and is no fault.

What it cannot see: a fault that needs longer contexts, more neighbours or fuller pools than its prompts bring.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem.engine.outputs import RequestOutput
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CanaryPrompt:
    """A prompt and how many tokens to generate. It fills a page at least, or nothing of it can be found cached."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class CanaryAnswer:
    """What came back of one request: greedy tokens, what was found cached, and what became of drafts.

    ``error`` is why there is no answer; the rest says nothing then.
    """

    token_ids: tuple[int, ...]
    cached_tokens: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_preemptions: int = 0
    error: str | None = None

    @classmethod
    def of_output(cls, output: RequestOutput) -> CanaryAnswer:
        """What an engine of this process answered."""
        rounds = output.rounds
        return cls(
            tuple(output.token_ids),
            output.cached_tokens,
            rounds.num_rounds,
            rounds.num_drafted,
            rounds.num_accepted,
            output.num_preemptions,
            output.error,
        )

    @property
    def draft_len(self) -> float | None:
        """Drafts of a round, 0 without any; None where rounds without drafts lie between those with them."""
        if self.num_rounds == 0:
            return 0
        # Each round gives its accepted drafts and one token more, but for the last, which may end with a draft.
        if self.num_rounds + self.num_accepted < len(self.token_ids) - 1:
            return None
        return self.num_drafted / self.num_rounds


Send = Callable[[CanaryPrompt, str], Awaitable[CanaryAnswer]]
"""Runs a prompt greedily under a cache salt."""


@dataclass(frozen=True)
class CanaryResult:
    """One prompt on one route.

    ``faults`` is empty where all that was compared was as expected; ``not_compared`` says why something was left out.
    """

    prompt: str
    route: str
    answer: CanaryAnswer
    faults: tuple[str, ...]
    not_compared: str | None = None


@dataclass
class Canary:
    """Replays prompts and compares.

    Attributes:
        prompts: what is replayed.
        send: runs a prompt on this server; gives both the cold and the prefix-hit route.
        further_routes: other ways of sending, by route, such as through a context worker.
        max_difference: accepted drafts of a prompt by which two routes may differ.
        expected: answers by prompt; where one is missing the first whole cold answer is taken.
    """

    prompts: Sequence[CanaryPrompt]
    send: Send
    further_routes: dict[str, Send] = field(default_factory=dict)
    max_difference: int = 0
    expected: dict[str, CanaryAnswer] = field(default_factory=dict)
    _salt: str = field(default_factory=lambda: secrets.token_hex(8))
    _num_runs: int = 0
    _failing: set[tuple[str, str]] = field(default_factory=set)
    _said: set[tuple[str, str, str]] = field(default_factory=set)

    async def run(self) -> list[CanaryResult]:
        """Replay every prompt on every route; the log tells what begins and ceases to be faulty.

        A prompt without a cold answer is sent no further. Errors of sending are raised.
        """
        self._num_runs += 1
        results = []
        for prompt in self.prompts:
            salt = f"canary {self._salt} {self._num_runs} {prompt.name}"
            cold = await self.send(prompt, salt)
            if cold.error is None and cold.num_preemptions == 0:
                self.expected.setdefault(prompt.name, cold)
            results.append(self._judge(prompt, COLD, cold, self.expected.get(prompt.name, cold)))
            if cold.error is not None:
                continue
            results.append(self._judge(prompt, PREFIX_HIT, await self.send(prompt, salt), cold))
            for route, send in self.further_routes.items():
                results.append(self._judge(prompt, route, await send(prompt, f"{salt} {route}"), cold))
        for result in results:
            self._tell(result)
        return results

    def _judge(self, prompt: CanaryPrompt, route: str, answer: CanaryAnswer, other: CanaryAnswer) -> CanaryResult:
        if answer.error is not None:
            return CanaryResult(prompt.name, route, answer, (answer.error,))
        faults = []
        wanted = self.expected.get(prompt.name, other).token_ids
        left_out = _why_not_compared(route, answer, other)
        if answer.token_ids != wanted:
            at = first_difference(answer.token_ids, wanted)
            faults.append(f"token {at} of {len(answer.token_ids)} is not the expected one of {len(wanted)}")
        elif left_out is None and answer.num_accepted < other.num_accepted - self.max_difference:
            faults.append(
                f"{answer.num_accepted} of {answer.num_drafted} drafts accepted, where {other.num_accepted} of "
                f"{other.num_drafted} are expected"
            )
        if route == COLD and answer.cached_tokens and answer.num_preemptions == 0:
            faults.append(f"{answer.cached_tokens} tokens were found cached under a salt never used")
        return CanaryResult(prompt.name, route, answer, tuple(faults), left_out)

    def _tell(self, result: CanaryResult) -> None:
        key = (result.prompt, result.route)
        if result.faults and key not in self._failing:
            self._failing.add(key)
            for fault in result.faults:
                _log.error("canary %s on route %s: %s", *key, fault)
        elif not result.faults and key in self._failing:
            self._failing.remove(key)
            _log.info("canary %s on route %s is as expected again", *key)
        if result.not_compared is not None and (*key, result.not_compared) not in self._said:
            self._said.add((*key, result.not_compared))
            _log.warning("canary %s on route %s is not compared in full: %s", *key, result.not_compared)


def _why_not_compared(route: str, answer: CanaryAnswer, other: CanaryAnswer) -> str | None:
    """Why the accepted drafts of two answers say nothing about each other; None where they do."""
    if answer.num_preemptions or other.num_preemptions:
        return "it lost its seat to other requests"
    if route == PREFIX_HIT and not answer.cached_tokens:
        return "nothing of the prompt was found cached, so the route was not tried"
    if answer.draft_len is None or other.draft_len is None:
        return "not every round had drafts"
    if answer.draft_len != other.draft_len:
        return f"{answer.draft_len:g} drafts are proposed in a round, {other.draft_len:g} are expected"
    return None


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The first place where two sequences differ; the shorter's length where it begins the other."""
    return next(
        (place for place, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b),
        min(len(tokens), len(others)),
    )
