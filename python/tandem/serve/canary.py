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

What it cannot see: a fault that needs longer contexts, more neighbours or fuller pools than its prompts bring.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

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
    """What came back of one request: greedy tokens, what was found cached, and what became of drafts."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    num_drafted: int
    num_accepted: int


Send = Callable[[CanaryPrompt, str], Awaitable[CanaryAnswer]]
"""Runs a prompt greedily under a cache salt."""


@dataclass(frozen=True)
class CanaryResult:
    """One prompt on one route; ``faults`` is empty where all was as expected."""

    prompt: str
    route: str
    answer: CanaryAnswer
    faults: tuple[str, ...]


@dataclass
class Canary:
    """Replays prompts and compares.

    Attributes:
        prompts: what is replayed.
        send: runs a prompt on this server; gives both the cold and the prefix-hit route.
        further_routes: other ways of sending, by route, such as through a context worker.
        max_difference: accepted drafts of a prompt by which two routes may differ.
        expected: answers by prompt; where one is missing the first cold answer is taken.
    """

    prompts: Sequence[CanaryPrompt]
    send: Send
    further_routes: dict[str, Send] = field(default_factory=dict)
    max_difference: int = 0
    expected: dict[str, CanaryAnswer] = field(default_factory=dict)
    _salt: str = field(default_factory=lambda: secrets.token_hex(8))
    _num_runs: int = 0

    async def run(self) -> list[CanaryResult]:
        """Replay every prompt on every route; faults are logged. Errors of sending are raised."""
        self._num_runs += 1
        results = []
        for prompt in self.prompts:
            salt = f"canary {self._salt} {self._num_runs} {prompt.name}"
            cold = await self.send(prompt, salt)
            expected = self.expected.setdefault(prompt.name, cold)
            results.append(self._judge(prompt, COLD, cold, expected))
            hit = await self.send(prompt, salt)
            results.append(self._judge(prompt, PREFIX_HIT, hit, cold))
            for route, send in self.further_routes.items():
                results.append(self._judge(prompt, route, await send(prompt, f"{salt} {route}"), cold))
        for result in results:
            for fault in result.faults:
                _log.error("canary %s on route %s: %s", result.prompt, result.route, fault)
        return results

    def _judge(self, prompt: CanaryPrompt, route: str, answer: CanaryAnswer, other: CanaryAnswer) -> CanaryResult:
        faults = []
        wanted = self.expected[prompt.name].token_ids
        if answer.token_ids != wanted:
            at = first_difference(answer.token_ids, wanted)
            faults.append(f"token {at} of {len(answer.token_ids)} is not the expected one of {len(wanted)}")
        elif answer.num_accepted < other.num_accepted - self.max_difference:
            faults.append(
                f"{answer.num_accepted} of {answer.num_drafted} drafts accepted, where {other.num_accepted} of "
                f"{other.num_drafted} are expected"
            )
        if route == COLD and answer.cached_tokens:
            faults.append(f"{answer.cached_tokens} tokens were found cached under a salt never used")
        if route == PREFIX_HIT and not answer.cached_tokens:
            faults.append("nothing of the prompt was found cached, so the route was not tried")
        return CanaryResult(prompt.name, route, answer, tuple(faults))


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The first place where two sequences differ; the shorter's length where it begins the other."""
    return next(
        (place for place, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b),
        min(len(tokens), len(others)),
    )
