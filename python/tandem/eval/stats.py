"""Intervals of measured shares, from counts or by resampling."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959963984540054  # the 0.975 quantile of the normal distribution


@dataclass(frozen=True)
class Interval:
    """A two-sided 95 % interval of a share."""

    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """The score interval of a share of independent trials; [0, 1] where there were none.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, 1927. It stays inside [0, 1]
    and keeps its cover for shares near 0 and 1, where the normal interval fails.

    Raises:
        ValueError: `successes` is not in [0, `trials`].
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials; allowed are 0 to {trials}")
    if trials == 0:
        return Interval(0.0, 1.0)
    share, z2 = successes / trials, _Z95 * _Z95
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    # At the ends the bound equals the share itself, which rounding would miss.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(low, high)


def bootstrap_share(clusters: Sequence[Sequence[bool]], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """The percentile interval of the pooled share when outcomes of one cluster depend on each other.

    Whole clusters are drawn with replacement, so that questions about one document count as one piece of evidence.
    Where every outcome is the same, resampling cannot show any spread; the interval is then Wilson's, with the
    clusters as the trials. A single cluster of mixed outcomes says nothing about other clusters: [0, 1].

    Raises:
        ValueError: a cluster is empty, or there are none.
    """
    if not clusters or not all(clusters):
        raise ValueError("a bootstrap needs at least one cluster, and outcomes in each")
    return bootstrap_counts([(sum(cluster), len(cluster)) for cluster in clusters], resamples=resamples, seed=seed)


def bootstrap_counts(counts: Sequence[tuple[int, int]], *, resamples: int = 2000, seed: int = 0) -> Interval:
    """As `bootstrap_share`, of clusters that are given as (successes, trials).

    Raises:
        ValueError: a cluster has no trials, or there are no clusters.
    """
    if not counts or not all(trials > 0 for _, trials in counts):
        raise ValueError("a bootstrap needs at least one cluster, and trials in each")
    right, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if right in (0, total):
        return wilson(len(counts) if right else 0, len(counts))
    if len(counts) == 1:
        return Interval(0.0, 1.0)
    rng = random.Random(seed)
    shares = []
    for _ in range(resamples):
        drawn = rng.choices(counts, k=len(counts))
        shares.append(sum(c[0] for c in drawn) / sum(c[1] for c in drawn))
    shares.sort()
    return Interval(_quantile(shares, 0.025), _quantile(shares, 0.975))


def share_interval(clusters: Sequence[Sequence[bool]]) -> Interval:
    """Wilson's interval where every cluster is a single outcome, else the bootstrap by cluster."""
    if all(len(cluster) == 1 for cluster in clusters):
        return wilson(sum(cluster[0] for cluster in clusters), len(clusters))
    return bootstrap_share(clusters)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
