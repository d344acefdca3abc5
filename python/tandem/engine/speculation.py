"""What became of drafts: counts, and the figures that follow from them.

Counted are rounds: rows that verified drafts and whose result counted. Padding, rows of a sequence that had ended or
lost its seat meanwhile, failed steps and rows without drafts are none, nor is the token that a prefill ends with. All
drafts that a round verified are drafted. Accepted are those that were kept: where a request ends within its round, the
drafts up to and including the token that ends it, so that what follows counts as drafted and not accepted.

A figure whose divisor is 0 is None here and absent from dictionaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.core import sched


@dataclass(frozen=True)
class RoundCounts:
    """Rounds, and the drafts of them together."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @classmethod
    def of_request(cls, terminal: sched.Terminal) -> RoundCounts:
        """Those of a request that has ended."""
        return cls(terminal.num_rounds, terminal.num_drafted_tokens, terminal.num_accepted_tokens)

    @property
    def rate(self) -> float | None:
        """Accepted drafts over drafted ones."""
        return self.num_accepted / self.num_drafted if self.num_drafted > 0 else None

    @property
    def mean_length(self) -> float | None:
        """The mean acceptance length: accepted drafts of a round, and one, averaged over the rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds > 0 else None

    def __add__(self, other: RoundCounts) -> RoundCounts:
        return RoundCounts(
            self.num_rounds + other.num_rounds,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `rounds`, `drafted`, `accepted`, and where defined `rate` and `mean_length`."""
        counts = {"rounds": self.num_rounds, "drafted": self.num_drafted, "accepted": self.num_accepted}
        figures = {"rate": self.rate, "mean_length": self.mean_length}
        return counts | {name: value for name, value in figures.items() if value is not None}

    def __str__(self) -> str:
        length = "" if self.mean_length is None else f", mean acceptance length {self.mean_length:.3f}"
        return f"{self.num_rounds} rounds, {self.num_accepted} of {self.num_drafted} drafts accepted{length}"


NO_ROUNDS = RoundCounts()


@dataclass(frozen=True)
class RouteCounts:
    """The rounds of one route; `drafted` and `accepted` by place in the round, the first draft at 0."""

    num_rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, rounds: sched.Rounds) -> RouteCounts:
        """What the scheduler counted."""
        return cls(rounds.num_rounds, tuple(rounds.num_drafted), tuple(rounds.num_accepted))

    @property
    def total(self) -> RoundCounts:
        """All places together."""
        return RoundCounts(self.num_rounds, sum(self.drafted), sum(self.accepted))

    @property
    def rates(self) -> list[float]:
        """The share of drafts accepted at each place, as far as any were drafted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d > 0]

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return self._combined(other, 1)

    def __sub__(self, other: RouteCounts) -> RouteCounts:
        return self._combined(other, -1)

    def _combined(self, other: RouteCounts, sign: int) -> RouteCounts:
        return RouteCounts(
            self.num_rounds + sign * other.num_rounds,
            tuple(a + sign * b for a, b in zip(self.drafted, other.drafted, strict=True)),
            tuple(a + sign * b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form: that of `total`, and `rate_by_position`."""
        return self.total.to_dict() | {"rate_by_position": self.rates}

    def __str__(self) -> str:
        places = ", by position " + " ".join(f"{rate:.3f}" for rate in self.rates) if self.rates else ""
        return f"{self.total}{places}"


@dataclass(frozen=True)
class SpeculationStats:
    """Cumulative counts by route: what a sequence began with when it was last admitted.

    A sequence that began with pages of the prefix cache is a prefix hit, any other is cold. One that was preempted and
    finds its own pages again is a prefix hit from then on: its drafts depend on what the cache gave back.
    """

    cold: RouteCounts
    prefix_hit: RouteCounts

    @classmethod
    def of(cls, stats: sched.Stats) -> SpeculationStats:
        """What the scheduler counted."""
        return cls(RouteCounts.of(stats.cold_rounds), RouteCounts.of(stats.prefix_hit_rounds))

    @property
    def total(self) -> RouteCounts:
        """Both routes together."""
        return self.cold + self.prefix_hit

    def __sub__(self, before: SpeculationStats) -> SpeculationStats:
        """What was counted since `before`."""
        return SpeculationStats(self.cold - before.cold, self.prefix_hit - before.prefix_hit)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: that of `total`, and each route's under `routes`."""
        routes = {"cold": self.cold.to_dict(), "prefix_hit": self.prefix_hit.to_dict()}
        return self.total.to_dict() | {"routes": routes}
