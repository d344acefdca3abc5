"""How many drafts are accepted: the alarm for a damaged draft cache, which accuracy alone cannot be.

The model answers held-out questions greedily with a drafter. Every round of every reply counts, up to its end. A gate
holds the lower bound of the interval against floors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.engine.chat import Message, ThinkingMode
from tandem.engine.llm import LLM
from tandem.engine.outputs import RequestOutput
from tandem.engine.speculation import NO_ROUNDS, RouteCounts
from tandem.eval.ask import judge, replies
from tandem.eval.questions import Question
from tandem.eval.report import Report
from tandem.eval.sources import by_cluster
from tandem.eval.stats import Interval, bootstrap_counts

Route = Literal["cold", "prefix-hit"]

WORKED_EXAMPLE: tuple[Message, ...] = (
    {
        "role": "user",
        "content": "A baker fills 6 trays with 14 rolls each. She sells 34 rolls before noon and half of the rest in "
        "the afternoon, and gives 4 of those that are left to a neighbor. How many rolls does she have in the end? "
        "Give the result as your final answer. Do not include units.",
    },
    {
        "role": "assistant",
        "content": "She fills the trays with 6*14 = 84 rolls.\nBefore noon she sells 34, so there are 84-34 = 50 rolls "
        "left.\nIn the afternoon she sells 50/2 = 25 rolls, so there are 50-25 = 25 rolls left.\nShe gives 4 away, so "
        "she has 25-4 = 21 rolls in the end.\nThe answer is 21.",
    },
)
"""Turns before each word problem, on every route: a word problem alone is shorter than a page and could hit none."""


class NothingDraftedError(ValueError):
    """There is no drafter, it proposes nothing, or no reply was long enough for a round."""


class ReducedDraftingError(ValueError):
    """Some steps of a reply drafted nothing, so that its rounds are not the whole of it."""


class NoHitError(ValueError):
    """A prompt that was served before began with nothing cached, so its rounds are none of the prefix-hit route."""


class CountsError(RuntimeError):
    """Counts of rounds that contradict each other: the statistics are at fault, not the drafter."""


@dataclass(frozen=True)
class Floors:
    """What the lower bounds of a gate's intervals must reach."""

    rate: float
    length: float


@dataclass(frozen=True)
class AcceptanceReport:
    """The rounds of an evaluation.

    Attributes:
        accuracy: the answers, judged.
        route: what the sequences began with.
        draft_len: drafts of every round.
        counts: all rounds.
        by_cluster: accepted and drafted tokens of the questions of each cluster, of those that drafted any.
    """

    accuracy: Report
    route: Route
    draft_len: int
    counts: RouteCounts
    by_cluster: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        total = self.counts.total
        if total.num_rounds == 0:
            raise NothingDraftedError("no reply was long enough for a round")
        # Then the mean length is 1 + draft_len x rate, and one interval says it all.
        if total.num_drafted != self.draft_len * total.num_rounds:
            raise CountsError(f"{total.num_rounds} rounds of {self.draft_len} drafts drafted {total.num_drafted}")
        parts = sum(accepted for accepted, _ in self.by_cluster), sum(drafted for _, drafted in self.by_cluster)
        if parts != (total.num_accepted, total.num_drafted):
            raise CountsError(f"requests accepted and drafted {parts}, the engine {total}")

    def _length_of(self, rate: float) -> float:
        return 1 + self.draft_len * rate

    @property
    def rate(self) -> float:
        """Accepted drafts over drafted ones."""
        total = self.counts.total
        return total.num_accepted / total.num_drafted

    @property
    def mean_length(self) -> float:
        """The mean acceptance length: accepted drafts of a round and one, averaged over the rounds."""
        total = self.counts.total
        return 1 + total.num_accepted / total.num_rounds

    @property
    def rate_interval(self) -> Interval:
        """The 95 % interval of the rate, by resampling prompts (those that share a text together), seeded."""
        return bootstrap_counts(self.by_cluster)

    @property
    def length_interval(self) -> Interval:
        """The 95 % interval of the mean length, which follows from that of the rate."""
        rate = self.rate_interval
        return Interval(self._length_of(rate.low), self._length_of(rate.high))

    def passes(self, floors: Floors) -> bool:
        """Whether the lower bounds reach the floors."""
        return self.rate_interval.low >= floors.rate and self.length_interval.low >= floors.length

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        rate, length = self.rate_interval, self.length_interval
        return {
            **self.accuracy.to_dict(),
            "route": self.route,
            "draft_len": self.draft_len,
            **self.counts.to_dict(),
            "rate_interval": [rate.low, rate.high],
            "mean_length_interval": [length.low, length.high],
        }

    def __str__(self) -> str:
        rate, length = self.rate_interval, self.length_interval
        return "\n".join(
            (
                str(self.accuracy),
                f"{self.route}, {self.draft_len} drafts a round: {self.counts}",
                f"  acceptance rate {self.rate:.4f} (95 % by prompt: {rate.low:.4f} to {rate.high:.4f})",
                f"  mean acceptance length {self.mean_length:.3f} (95 %: {length.low:.3f} to {length.high:.3f})",
            )
        )


def measure(
    llm: LLM,
    name: str,
    questions: Sequence[Question],
    *,
    route: Route,
    max_tokens: int = 512,
    thinking_mode: ThinkingMode = "enabled",
    preface: Sequence[Message] = (),
    progress: bool = False,
) -> AcceptanceReport:
    """Asks every question with `preface` before it, and counts the rounds of the replies.

    Args:
        llm: the model and its drafter, which proposes in every step however many sequences run; for the route `cold` it
            must have no prefix cache.
        name: of the evaluation, for the report.
        questions: at least one.
        route: with `prefix-hit` each prompt runs once for a single token, which no draft precedes, to fill the prefix
            cache, and then again to be measured.
        max_tokens: most tokens of a reply.
        thinking_mode: how the reply is opened.
        preface: turns before each question.
        progress: show a progress bar.

    Raises:
        NothingDraftedError: no drafts are proposed.
        ReducedDraftingError: some steps of a reply drafted nothing.
        NoHitError: with `prefix-hit`, a measured prompt found nothing cached.
        tandem.engine.errors.RequestFailedError: a request ended by an error of the engine.
        tandem.engine.errors.InvalidPromptError: a question does not fit into the model's length.
    """
    draft_len = llm.limits.max_draft_len
    if draft_len == 0:
        raise NothingDraftedError("the model has no drafter, or draft_len is 0: no drafts are proposed")

    def serve(most: int) -> list[RequestOutput]:
        return replies(llm, questions, max_tokens=most, thinking_mode=thinking_mode, preface=preface, progress=progress)

    if route == "prefix-hit":
        serve(1)
    before = llm.stats().speculation
    outputs = serve(max_tokens)
    accuracy = judge(name, questions, outputs, thinking_mode)
    since = llm.stats().speculation - before
    _require_whole_replies(outputs)
    if route == "prefix-hit":
        _require_hits(outputs, llm.limits.tokens_per_page)
    counts = since.prefix_hit if route == "prefix-hit" else since.cold
    return AcceptanceReport(accuracy, route, draft_len, counts, _by_cluster(questions, outputs))


def _require_whole_replies(outputs: Sequence[RequestOutput]) -> None:
    """Every token but those that prefills end with must be from a round, an accepted draft or the one after them."""
    partly = 0
    for output in outputs:
        from_prefills = 1 + output.num_preemptions
        partly += output.completion_tokens > from_prefills + output.rounds.num_accepted + output.rounds.num_rounds
    if partly:
        raise ReducedDraftingError(
            f"in {partly} of {len(outputs)} replies some steps drafted nothing: too many sequences ran at once"
        )


def _require_hits(outputs: Sequence[RequestOutput], tokens_per_page: int) -> None:
    missed = [output for output in outputs if output.cached_tokens == 0]
    if missed:
        shortest = min(output.prompt_tokens for output in missed)
        raise NoHitError(
            f"{len(missed)} of {len(outputs)} prompts began with nothing cached though they were served before: a hit "
            f"needs {tokens_per_page} tokens, the shortest of them has {shortest}, and the page pool must hold them all"
        )


def _by_cluster(questions: Sequence[Question], outputs: Sequence[RequestOutput]) -> tuple[tuple[int, int], ...]:
    """(accepted, drafted) of each cluster that drafted anything."""
    rounds = iter(output.rounds for output in outputs)
    totals = [sum((next(rounds) for _ in group), NO_ROUNDS) for group in by_cluster(questions)]
    return tuple((total.num_accepted, total.num_drafted) for total in totals if total.num_drafted > 0)
