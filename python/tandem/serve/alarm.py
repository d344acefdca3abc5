"""Raises an alarm where drafts are accepted less often than they should be: a damaged draft cache shows nowhere else.

Model. A prompt has an acceptance rate of its own, of mean ``rate`` and standard deviation ``prompt_sd`` over prompts; a
round's accepted share scatters about it with ``round_sd``. So the mean share of n rounds of one prompt has variance
``v(n) = prompt_sd**2 + round_sd**2 / n``: prompts are the evidence, further rounds of one prompt soon add nothing.

Test. With score ``s = (rate - mean) / sqrt(v)``, held to +-3 so that no single odd prompt decides, and ``d = FALL /
sqrt(v)``, a prompt's log-likelihood ratio of "fallen by FALL" to "as before" is ``d * (s - d / 2)``. It is followed
while the prompt runs: each report adds the ratio after less the ratio before. The alarm's statistic is the sum of what
was added, never below 0 (CUSUM: Page, Continuous inspection schemes, 1954); under the model the exponential of the sum
is a martingale, so that false alarms become rarer by e per unit of threshold (Lorden, Procedures for reacting to a
change in distribution, 1971). `THRESHOLD` was set by simulation (`tools/perf/alarm_simulation.py`), since a prompt's
mean is skewed and not normal. A raised alarm is cleared by the same sum with the sign turned.

Routes. The baseline is given, or learned on the cold route. A change of the traffic moves acceptance further than a
fault does, and moves all routes. So a route other than cold is tested against the baseline, and must besides lie below
the cold route over the very window in which its own evidence gathered. Where the cold route itself leaves a learned
baseline, either way, that is taken for a change of the traffic: the baseline is learned anew and all tests begin again.
A learned baseline therefore says nothing about the cold route; a given one is tested there like anywhere else.

What this cannot do: tell a fault of one route from traffic that changes on that route alone (the canary can); see a
fault that has been there on all routes since the start without a given baseline (the canary's expected tokens and rates
can); find a small fall among few and very unlike prompts (docs/alarm.md says how long it takes).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace

from tandem.serve.metrics_snapshot import COLD, HANDED_OVER, PREFIX_HIT, AlarmState

_log = logging.getLogger(__name__)

FALL = 0.04
"""The fall of the rate that the test is best at; others are found as well, larger ones sooner."""
THRESHOLD = 11.5
CLEAR_THRESHOLD = 7.0
CONFIRM_THRESHOLD = 2.5
"""Log-likelihood ratio of a route `FALL` below the cold one, over the same window, to one level with it."""
MIN_PROMPTS = 8
"""Prompts that such a comparison needs on either side."""
QUIET_PROMPTS = 32
"""A cold route with fewer than `MIN_PROMPTS` beside so many of another is quiet; a given baseline then stands alone."""
MIN_LEARN_PROMPTS = 1000
REFINE_PROMPTS = 50
"""A learned baseline is estimated again after each so many prompts."""
MIN_SD = 0.01
"""No traffic is more uniform than that; an estimate below is chance."""
MAX_SCORE = 3.0
ROUTES = (COLD, PREFIX_HIT, HANDED_OVER)


@dataclass(frozen=True)
class Baseline:
    """What to expect of acceptance.

    Attributes:
        rate: mean share of drafts accepted, in (0, 1).
        prompt_sd: standard deviation between prompts of a prompt's own rate, in [0.01, 0.5].
        round_sd: standard deviation of a round's share about its prompt's rate, in [0.01, 0.5].

    Raises:
        ValueError: a value is outside of its range.
    """

    rate: float
    prompt_sd: float
    round_sd: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < 1.0:
            raise ValueError(f"rate={self.rate} is not allowed: between 0 and 1")
        for name, value in (("prompt_sd", self.prompt_sd), ("round_sd", self.round_sd)):
            if not MIN_SD <= value <= 0.5:
                raise ValueError(f"{name}={value} is not allowed: {MIN_SD} to 0.5")

    def variance(self, num_rounds: int) -> float:
        """Of the mean share of so many rounds of one prompt."""
        return self.prompt_sd**2 + self.round_sd**2 / num_rounds

    def evidence(self, rounds: PromptRounds) -> tuple[float, float]:
        """Log-likelihood ratios that a prompt gives so far, of a fall and of a rise by `FALL`, to no change."""
        if rounds.count == 0:
            return 0.0, 0.0
        deviation = math.sqrt(self.variance(rounds.count))
        score = min(max((self.rate - rounds.mean) / deviation, -MAX_SCORE), MAX_SCORE)
        change = FALL / deviation
        return change * (score - change / 2), change * (-score - change / 2)


@dataclass(frozen=True)
class PromptRounds:
    """Rounds of one prompt: how many, the sum of their accepted shares, and their drafts."""

    count: int = 0
    shares: float = 0.0
    num_drafted: int = 0

    def __add__(self, other: PromptRounds) -> PromptRounds:
        return PromptRounds(self.count + other.count, self.shares + other.shares, self.num_drafted + other.num_drafted)

    @property
    def mean(self) -> float:
        """Of the shares."""
        return self.shares / self.count


def round_sd(rate: float, draft_len: int) -> float:
    """Standard deviation of a round's share if each draft is accepted with one chance until the first that is not."""
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        below = sum(chance**place for place in range(1, draft_len + 1)) < rate * draft_len
        low, high = (chance, high) if below else (low, chance)
    # Of n accepted the square is the sum of the first n odd numbers.
    square = sum((2 * place - 1) * low**place for place in range(1, draft_len + 1)) / draft_len**2
    return math.sqrt(max(square - rate**2, 0.0))


class Learner:
    """Estimates a baseline from prompts: an analysis of variance with prompts as groups.

    What rounds of one prompt scatter follows from the rate (`round_sd`); what prompts scatter beyond that is the spread
    between them, runs of easy and hard text within a prompt included.
    Source: Searle, Casella and McCulloch, Variance Components, 1992, chapter 3 (unbalanced one-way random model).
    """

    def __init__(self) -> None:
        self.num_prompts = 0
        self._rounds = self._rounds_squared = self._drafted = 0
        self._shares = self._squares = 0.0

    def add(self, prompt: PromptRounds) -> None:
        """Take in a prompt that has ended."""
        self.num_prompts += 1
        self._rounds += prompt.count
        self._rounds_squared += prompt.count**2
        self._drafted += prompt.num_drafted
        self._shares += prompt.shares
        self._squares += prompt.shares * prompt.mean

    def baseline(self) -> Baseline | None:
        """The estimate; None while there is too little, or where everything or nothing was accepted."""
        if self.num_prompts < MIN_LEARN_PROMPTS or not 0 < self._shares < self._rounds:
            return None
        rate = self._shares / self._rounds
        within = round_sd(rate, round(self._drafted / self._rounds))
        between = self._squares - self._rounds * rate**2 - (self.num_prompts - 1) * within**2
        variance = between / (self._rounds - self._rounds_squared / self._rounds)
        prompt_sd = math.sqrt(max(variance, 0.0))
        return Baseline(rate, min(max(prompt_sd, MIN_SD), 0.5), min(max(within, MIN_SD), 0.5))


class _Window:
    """Mean share of a route since some moment: prompts weighted by what they tell."""

    def __init__(self) -> None:
        self._open: dict[int, PromptRounds] = {}
        self._ended = _WeightedSums()
        self.num_rounds = 0

    def add(self, prompt: int, rounds: PromptRounds) -> None:
        self._open[prompt] = self._open.get(prompt, PromptRounds()) + rounds
        self.num_rounds += rounds.count

    def end(self, prompt: int, baseline: Baseline) -> None:
        rounds = self._open.pop(prompt, None)
        if rounds is not None:
            self._ended.add(1 / baseline.variance(rounds.count), rounds.mean)

    @property
    def num_prompts(self) -> int:
        return self._ended.count + len(self._open)

    def mean(self, baseline: Baseline) -> tuple[float, float]:
        """(mean, its variance); there must be a prompt."""
        sums = replace(self._ended)
        for rounds in self._open.values():
            sums.add(1 / baseline.variance(rounds.count), rounds.mean)
        return sums.mean()


@dataclass
class _WeightedSums:
    count: int = 0
    weight: float = 0.0
    weighted: float = 0.0
    squared: float = 0.0
    squared_mean: float = 0.0
    squared_square: float = 0.0

    def add(self, weight: float, mean: float) -> None:
        self.count += 1
        self.weight += weight
        self.weighted += weight * mean
        self.squared += weight**2
        self.squared_mean += weight**2 * mean
        self.squared_square += weight**2 * mean**2

    def mean(self) -> tuple[float, float]:
        """(mean, its variance): what the weights promise, or what the spread of the prompts shows if that is more."""
        mean = self.weighted / self.weight
        spread = self.squared_square - 2 * mean * self.squared_mean + mean**2 * self.squared
        return mean, max(1 / self.weight, spread / self.weight**2)


@dataclass
class _Route:
    """The tests of one route: sums of the evidence for a fall, for a rise, and against the fall that was found."""

    prompts: dict[int, PromptRounds] = field(default_factory=dict)
    fall: float = 0.0
    rise: float = 0.0
    recovery: float = 0.0
    raised: bool = False
    num_raised: int = 0
    window: _Window = field(default_factory=_Window)
    cold_window: _Window = field(default_factory=_Window)

    def begin_again(self) -> None:
        self.fall = self.rise = self.recovery = 0.0
        self.window, self.cold_window = _Window(), _Window()


class AcceptanceAlarm:
    """Watches acceptance per route. Belongs to one thread.

    Args:
        baseline: what was measured on this model with such traffic; None learns it from the first
            `MIN_LEARN_PROMPTS` prompts of the cold route and goes on refining it.
    """

    def __init__(self, baseline: Baseline | None = None) -> None:
        self._given = baseline
        self._baseline = baseline
        self._learner = Learner()
        self._routes = {route: _Route() for route in ROUTES}

    @property
    def baseline(self) -> Baseline | None:
        """What routes are tested against; None while it is being learned."""
        return self._baseline

    def states(self) -> dict[str, AlarmState]:
        """Of each route."""
        return {
            name: AlarmState(raised=route.raised, evidence=route.fall / THRESHOLD, num_raised=route.num_raised)
            for name, route in self._routes.items()
        }

    def report(self, route: str, prompt: int, num_rounds: int, num_drafted: int, num_accepted: int) -> None:
        """Rounds of a prompt since its last report: some ten at a time while it runs, or all when it ends.

        Only rounds that drafted the full draft length belong here, since fewer drafts are accepted at a higher rate.

        Args:
            route: one of `ROUTES`.
            prompt: any number that is the request's own until `end`.
            num_rounds: at least 1.
            num_drafted: drafts verified in them.
            num_accepted: of these, accepted.

        Raises:
            ValueError: the route is unknown, or the numbers cannot be.
        """
        if route not in self._routes:
            raise ValueError(f"route={route!r} is not allowed: one of {', '.join(ROUTES)}")
        if not (num_rounds >= 1 and num_drafted >= num_rounds and 0 <= num_accepted <= num_drafted):
            raise ValueError(f"{num_rounds} rounds with {num_accepted} of {num_drafted} drafts accepted cannot be")
        rounds = PromptRounds(num_rounds, num_rounds * num_accepted / num_drafted, num_drafted)
        tested = self._routes[route]
        before = tested.prompts.get(prompt, PromptRounds())
        tested.prompts[prompt] = after = before + rounds
        if self._baseline is None:
            return
        for each in self._routes.values() if route == COLD else (tested,):
            (each.window if each is tested else each.cold_window).add(prompt, rounds)
        fall, rise = (
            b - a for a, b in zip(self._baseline.evidence(before), self._baseline.evidence(after), strict=True)
        )
        tested.fall = max(0.0, tested.fall + fall)
        tested.rise = max(0.0, tested.rise + rise)
        tested.recovery = max(0.0, tested.recovery - fall)
        if route == COLD and self._given is None:
            if max(tested.fall, tested.rise) >= THRESHOLD:
                self._learn_anew("fell" if tested.fall > tested.rise else "rose")
        else:
            self._decide(route, tested)

    def end(self, prompt: int) -> None:
        """A prompt has no more rounds."""
        cold = self._routes[COLD].prompts.get(prompt)
        for route in self._routes.values():
            route.prompts.pop(prompt, None)
            if self._baseline is not None:
                route.window.end(prompt, self._baseline)
                route.cold_window.end(prompt, self._baseline)
        if cold is not None and self._given is None:
            self._learn(cold)

    def _learn(self, prompt: PromptRounds) -> None:
        self._learner.add(prompt)
        if self._learner.num_prompts % REFINE_PROMPTS == 0 and (found := self._learner.baseline()) is not None:
            if self._baseline is None:
                _log.info("acceptance baseline learned from %d cold prompts: %s", self._learner.num_prompts, found)
            self._baseline = found

    def _learn_anew(self, moved: str) -> None:
        """The traffic has changed: what was learned does not hold, for any route."""
        assert self._baseline is not None
        _log.info("acceptance on the cold route %s from %.3f; its baseline is learned anew", moved, self._baseline.rate)
        self._baseline, self._learner = None, Learner()
        for route in self._routes.values():
            route.begin_again()

    def _decide(self, name: str, route: _Route) -> None:
        if route.raised:
            if route.recovery >= CLEAR_THRESHOLD:
                _log.warning("acceptance alarm of route %s cleared: %s", name, self._evidence(name, route))
                route.raised = False
                route.begin_again()
        elif route.fall >= THRESHOLD:
            if self._is_confirmed(name, route):
                _log.error("acceptance alarm of route %s: %s", name, self._evidence(name, route))
                route.raised, route.recovery = True, 0.0
                route.num_raised += 1
        elif route.fall == 0.0:
            route.window, route.cold_window = _Window(), _Window()

    def _is_confirmed(self, name: str, route: _Route) -> bool:
        """Whether the route lies below the cold one too, over the same window."""
        assert self._baseline is not None
        if name == COLD:
            return True
        if route.cold_window.num_prompts < MIN_PROMPTS:
            return self._given is not None and route.window.num_prompts >= QUIET_PROMPTS
        if route.window.num_prompts < MIN_PROMPTS:
            return False
        mean, variance = route.window.mean(self._baseline)
        cold_mean, cold_variance = route.cold_window.mean(self._baseline)
        below = cold_mean - mean
        return FALL * (below - FALL / 2) >= CONFIRM_THRESHOLD * (variance + cold_variance)

    def _evidence(self, name: str, route: _Route) -> str:
        assert self._baseline is not None
        mean, variance = route.window.mean(self._baseline)
        text = (
            f"{mean:.3f} +- {math.sqrt(variance):.3f} of drafts accepted in {route.window.num_rounds} rounds of "
            f"{route.window.num_prompts} prompts, against a baseline of {self._baseline.rate:.3f} (between prompts "
            f"+- {self._baseline.prompt_sd:.3f}; {'learned' if self._given is None else 'given'})"
        )
        if name == COLD:
            return text
        if route.cold_window.num_prompts == 0:
            return f"{text}; the cold route had no traffic meanwhile"
        cold_mean, cold_variance = route.cold_window.mean(self._baseline)
        return f"{text}; cold meanwhile {cold_mean:.3f} +- {math.sqrt(cold_variance):.3f}"
