"""What an evaluation found: shares with their intervals, as text and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.eval.questions import Question
from tandem.eval.stats import Interval, share_interval


@dataclass(frozen=True)
class Outcome:
    """One question, the model's answer without its reasoning, and whether it was right."""

    question: Question
    given: str
    right: bool


@dataclass(frozen=True)
class Share:
    """How many of some questions were answered rightly, with the 95 % interval of the share."""

    questions: int
    accuracy: float
    interval: Interval

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Share":
        """The share over `outcomes`, at least one; resampled by cluster where questions share text."""
        clusters: dict[str, list[bool]] = {}
        for place, outcome in enumerate(outcomes):
            key = f"alone {place}" if outcome.question.cluster is None else f"cluster {outcome.question.cluster}"
            clusters.setdefault(key, []).append(outcome.right)
        right = sum(outcome.right for outcome in outcomes)
        return cls(len(outcomes), right / len(outcomes), share_interval(list(clusters.values())))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `questions`, `accuracy`, `interval` as [low, high]."""
        interval = [self.interval.low, self.interval.high]
        return {"questions": self.questions, "accuracy": self.accuracy, "interval": interval}

    def __str__(self) -> str:
        low, high = self.interval.low, self.interval.high
        return f"{self.accuracy:.3f} of {self.questions} (95 %: {low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class Report:
    """The outcomes of one evaluation; every share is computed from them."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def total(self) -> Share:
        """The share over all questions."""
        return Share.of(self.outcomes)

    @property
    def unseen(self) -> Share | None:
        """The share over texts that training never met; None where the data marks none of them."""
        return self._part(lambda question: question.seen is False)

    @property
    def seen(self) -> Share | None:
        """The share over texts that training may have met; None where the data marks none of them."""
        return self._part(lambda question: question.seen is True)

    @property
    def categories(self) -> dict[str, Share]:
        """The share of each category, in the order of its name."""
        names = sorted({o.question.category for o in self.outcomes if o.question.category is not None})
        return {name: Share.of([o for o in self.outcomes if o.question.category == name]) for name in names}

    def _part(self, belongs: Callable[[Question], bool]) -> Share | None:
        chosen = [outcome for outcome in self.outcomes if belongs(outcome.question)]
        return Share.of(chosen) if chosen else None

    def to_dict(self) -> dict[str, Any]:
        """JSON form: that of `total`, with `unseen`, `seen`, `categories` where the data tells them apart."""
        found: dict[str, Any] = {"evaluation": self.name, **self.total.to_dict()}
        for key, part in (("unseen", self.unseen), ("seen", self.seen)):
            if part is not None:
                found[key] = part.to_dict()
        if self.categories:
            found["categories"] = {name: share.to_dict() for name, share in self.categories.items()}
        return found

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.total}"]
        for label, part in (("unseen texts", self.unseen), ("seen texts", self.seen)):
            if part is not None:
                lines.append(f"  {label}: {part}")
        lines += [f"  {name}: {share}" for name, share in self.categories.items()]
        return "\n".join(lines)
