import math
import random

import pytest

from tandem.eval.stats import Interval, bootstrap_counts, bootstrap_share, share_interval, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_values(successes, trials, low, high):
    interval = wilson(successes, trials)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_wilson_of_successes_mirrors_that_of_failures():
    for successes in range(31):
        right, wrong = wilson(successes, 30), wilson(30 - successes, 30)
        assert right.low == pytest.approx(1 - wrong.high)
        assert 0 <= right.low <= successes / 30 <= right.high <= 1


def test_wilson_without_trials_knows_nothing_and_refuses_impossible_counts():
    assert wilson(0, 0) == Interval(0.0, 1.0)
    for successes, trials in [(-1, 3), (4, 3), (1, 0)]:
        with pytest.raises(ValueError, match="allowed are 0 to"):
            wilson(successes, trials)


def test_wilson_covers_the_true_share_in_95_of_100_cases_on_average():
    trials = 100
    intervals = [wilson(successes, trials) for successes in range(trials + 1)]
    coverages = []
    for true_share in (step / 100 for step in range(5, 96)):
        mass = [math.comb(trials, k) * true_share**k * (1 - true_share) ** (trials - k) for k in range(trials + 1)]
        inside = (interval.low <= true_share <= interval.high for interval in intervals)
        coverages.append(sum(m for m, i in zip(mass, inside, strict=True) if i))
    assert sum(coverages) / len(coverages) == pytest.approx(0.95, abs=0.005)
    assert min(coverages) > 0.92


def test_the_bootstrap_agrees_with_wilson_where_clusters_are_single_outcomes():
    outcomes = [[i % 4 != 0] for i in range(400)]
    drawn, exact = bootstrap_share(outcomes), wilson(300, 400)
    assert drawn.low == pytest.approx(exact.low, abs=0.01)
    assert drawn.high == pytest.approx(exact.high, abs=0.01)


def test_outcomes_that_move_together_widen_the_interval():
    rng = random.Random(5)
    together = [[rng.random() < 0.7] * 10 for _ in range(40)]
    apart = [[outcome] for cluster in together for outcome in cluster]
    wide, narrow = share_interval(together), share_interval(apart)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_the_bootstrap_repeats_with_its_seed():
    clusters = [[True, False], [True, True], [False, True], [True]]
    assert bootstrap_share(clusters, seed=3) == bootstrap_share(clusters, seed=3)
    assert bootstrap_share(clusters, seed=3, resamples=50) != bootstrap_share(clusters, seed=4, resamples=50)


@pytest.mark.parametrize(("outcome", "low", "high"), [(True, 0.7225, 1.0), (False, 0.0, 0.2775)])
def test_equal_outcomes_give_the_interval_of_as_many_clusters_and_not_a_point(outcome, low, high):
    interval = bootstrap_share([[outcome] * 5] * 10)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


def test_one_cluster_of_mixed_outcomes_says_nothing_about_others():
    assert bootstrap_share([[True, True, False]]) == Interval(0.0, 1.0)


@pytest.mark.parametrize("clusters", [[], [[True], []]])
def test_the_bootstrap_refuses_empty_clusters(clusters):
    with pytest.raises(ValueError, match="at least one cluster"):
        bootstrap_share(clusters)


def test_counts_are_resampled_as_the_outcomes_they_stand_for():
    clusters = [[True, False, True], [False, False], [True, True, True, True], [True, False]]
    counts = [(sum(cluster), len(cluster)) for cluster in clusters]
    assert bootstrap_counts(counts, seed=3) == bootstrap_share(clusters, seed=3)
    for bad in ([], [(1, 2), (0, 0)]):
        with pytest.raises(ValueError, match="at least one cluster"):
            bootstrap_counts(bad)
