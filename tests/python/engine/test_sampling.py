"""Choosing tokens: each stage against plain arithmetic, the distribution by chi-square, and independence of
neighbours.
"""

import math
from dataclasses import replace

import pytest
import torch

from tandem.engine.params import SamplingParams
from tandem.engine.sampling import (
    Adjustments,
    Choice,
    Penalties,
    SampleError,
    Truncation,
    adjust,
    gather_logprobs,
    greedy,
    penalise,
    sample,
    truncate,
)

NONE = Choice(None, None, None, None, None)


def noisy(num_positions: int, *, first_seed: int = 1, temperature: float = 1.0) -> Choice:
    return replace(
        NONE,
        temperature=torch.full((num_positions,), temperature),
        seed=torch.arange(first_seed, first_seed + num_positions),
    )


def truncation(num_positions: int, top_k: int = 1 << 30, top_p: float = 1.0, min_p: float = 0.0) -> Truncation:
    return Truncation(
        torch.full((num_positions,), top_k), torch.full((num_positions,), top_p), torch.full((num_positions,), min_p)
    )


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 258, 2051])
def test_no_id_outside_the_vocabulary_is_ever_chosen(vocab_size: int) -> None:
    logits = torch.full((64, vocab_size), -50.0)
    logits[:, :3] = 5.0
    assert greedy(logits).tokens.tolist() == [0] * 64
    tokens = sample(logits, torch.arange(64), noisy(64)).tokens
    assert int(tokens.max()) < 3
    flat = sample(torch.zeros(64, vocab_size), torch.arange(64), noisy(64)).tokens
    assert 0 <= int(flat.min()) <= int(flat.max()) < vocab_size


def test_of_equal_logits_the_lowest_id_wins() -> None:
    logits = torch.zeros(3, 2048)
    logits[0, [7, 900, 2047]] = 2.0
    logits[1, [2046, 2047]] = 2.0
    logits[2, [0, 1]] = 2.0
    assert greedy(logits).tokens.tolist() == [7, 2046, 0]
    assert sample(logits, torch.zeros(3, dtype=torch.int64), NONE).tokens.tolist() == [7, 2046, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_an_error_and_its_neighbours_are_not(bad: float) -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = logits.argmax(-1).tolist()
    logits[1, 40] = bad
    for sampled in (greedy(logits), sample(logits, torch.zeros(3, dtype=torch.int64), NONE)):
        assert sampled.errors.tolist() == [0, SampleError.NOT_FINITE, 0]
        assert sampled.tokens.tolist() == [expected[0], 0, expected[2]]


def test_a_row_where_every_id_is_forbidden_is_an_error() -> None:
    everything = torch.arange(8)
    forbid = Adjustments(
        torch.zeros(8, dtype=torch.int64), everything, torch.full((8,), -math.inf), torch.full((8,), 2**62)
    )
    sampled = sample(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), replace(noisy(2), adjustments=forbid))
    assert sampled.errors.tolist() == [SampleError.NOTHING_ALLOWED, 0]


def test_a_grammar_masks_what_it_forbids_and_leaves_other_positions_alone() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    allowed = torch.ones(4, 40, dtype=torch.bool)
    allowed[1] = False
    allowed[1, [5, 9]] = True
    allowed[2] = False
    for choice in (NONE, noisy(4), replace(noisy(4), truncation=truncation(4, top_k=1))):
        index = torch.arange(4)
        free = sample(logits, index, choice)
        bound = sample(logits, index, replace(choice, allowed=allowed))
        assert bound.errors.tolist() == [0, 0, SampleError.NOTHING_ALLOWED, 0]
        assert bound.tokens[[0, 3]].tolist() == free.tokens[[0, 3]].tolist()
        assert int(bound.tokens[1]) in (5, 9)


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    observed = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    used = expected > 0
    assert int(observed[~used].sum()) == 0
    return float(((observed[used] - expected[used]) ** 2 / expected[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("vary", ["seed", "index"])
@pytest.mark.parametrize(
    ("temperature", "cut"),
    [(1.0, {}), (0.5, {}), (2.0, {"top_k": 5}), (1.0, {"top_p": 0.7}), (1.3, {"min_p": 0.2, "top_k": 9, "top_p": 0.9})],
)
def test_tokens_follow_the_processed_distribution(vary: str, temperature: float, cut: dict[str, float]) -> None:
    draws = 30_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = reference_distribution(logits, temperature, **cut)
    counter, fixed = torch.arange(draws), torch.full((draws,), 3)
    seed, index = (counter, fixed) if vary == "seed" else (fixed, counter)
    choice = replace(
        noisy(draws, temperature=temperature), seed=seed, truncation=truncation(draws, **cut) if cut else None
    )
    tokens = sample(logits.expand(draws, 12), index, choice).tokens
    statistic, freedom = chi_square(tokens, expected)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


def reference_distribution(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p one token at a time, in double precision."""
    scaled = [float(x) / temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[: top_k or len(order)]
    total = sum(math.exp(scaled[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.append(i)
        mass += math.exp(scaled[i]) / total
    best = max(scaled[i] for i in kept)
    kept = [i for i in kept if math.exp(scaled[i] - best) >= min_p]
    probabilities = torch.zeros(len(scaled), dtype=torch.float64)
    for i in kept:
        probabilities[i] = math.exp(scaled[i])
    return probabilities / probabilities.sum()


def test_top_k_of_equal_logits_keeps_exactly_k_lowest_ids_first() -> None:
    kept = truncate(torch.zeros(1, 10), truncation(1, top_k=3))
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [0, 1, 2]


def test_truncation_that_cuts_nothing_changes_no_bit() -> None:
    logits = torch.randn(4, 3001, generator=torch.Generator().manual_seed(2))
    assert torch.equal(truncate(logits, truncation(4, top_k=3001)), logits)
    # The first token's probability rounds to 1, and the others must still be there.
    steep = torch.tensor([[0.0, -40.0, -50.0]])
    assert torch.equal(truncate(steep, truncation(1)), steep)


def test_the_most_likely_token_survives_every_truncation() -> None:
    logits = torch.tensor([[0.0, 0.5, 0.4]])
    kept = truncate(logits, truncation(1, top_k=1, top_p=1e-9, min_p=1.0))
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-38, 1e-4, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    SamplingParams(temperature=temperature)
    logits = torch.tensor([[8.9, 9.0, -40.0, float("-inf")]])
    for place in range(20):
        sampled = sample(logits, torch.tensor([place]), noisy(1, temperature=temperature))
        assert sampled.errors.tolist() == [0]
        assert sampled.tokens.tolist() != [3]
    if temperature < 1:
        assert sampled.tokens.tolist() == [1]


def make_penalties(vocab_size: int, repetition: float, presence: float, frequency: float) -> Penalties:
    seen = torch.zeros(1, vocab_size, dtype=torch.bool)
    seen[0, [0, 1]] = True
    counts = torch.zeros(1, vocab_size, dtype=torch.int32)
    counts[0, [1, 2]] = torch.tensor([1, 3], dtype=torch.int32)
    one = torch.ones(1)
    return Penalties(seen, counts, None, one * repetition, one * presence, one * frequency)


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0]])
    repeated = penalise(logits, make_penalties(4, 2.0, 0.0, 0.0))
    assert repeated.tolist() == [[1.0, -4.0, 2.0, 1.0]]
    present = penalise(logits, make_penalties(4, 1.0, 0.5, 0.0))
    assert present.tolist() == [[2.0, -2.5, 3.5, 1.0]]
    frequent = penalise(logits, make_penalties(4, 1.0, 0.0, 0.25))
    assert frequent.tolist() == [[2.0, -2.25, 3.25, 1.0]]


def test_penalties_count_the_drafts_that_stand_before_in_the_same_round() -> None:
    """Position t of a round must be scored as if drafts 1..t were already accepted."""
    vocab_size, drafts = 6, [3, 3, 5]
    base = make_penalties(vocab_size, 1.5, 0.3, 0.2)
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(3))
    preceding = torch.tensor([[-1, -1, -1], [3, -1, -1], [3, 3, -1], [3, 3, 5]])
    expand = {
        name: base.__dict__[name].expand(4, *base.__dict__[name].shape[1:])
        for name in base.__dict__
        if name != "preceding"
    }
    together = penalise(logits, Penalties(preceding=preceding, **expand))
    counts = base.counts.clone()
    for t in range(4):
        alone = penalise(logits[t : t + 1], replace(base, counts=counts.clone()))
        assert torch.equal(alone[0], together[t])
        if t < 3:
            counts[0, drafts[t]] += 1


def test_adjustments_end_at_their_token_index() -> None:
    mask = Adjustments(
        torch.tensor([0, 0, 1]),
        torch.tensor([2, 3, 2]),
        torch.tensor([-math.inf, 1.5, -math.inf]),
        torch.tensor([10, 99, 10]),
    )
    before = adjust(torch.zeros(2, 5), torch.tensor([9, 10]), mask)
    assert before.tolist() == [[0, 0, -math.inf, 1.5, 0], [0, 0, 0, 0, 0]]


def mixed_choice(num_positions: int, vocab_size: int) -> Choice:
    """Every stage in use, and each position with other parameters; each third is greedy."""
    n = torch.arange(num_positions)
    generator = torch.Generator().manual_seed(9)
    return Choice(
        temperature=(n % 3) * 0.7,
        seed=n * 1000,
        penalties=Penalties(
            torch.rand(num_positions, vocab_size, generator=generator) < 0.2,
            torch.randint(0, 3, (num_positions, vocab_size), generator=generator, dtype=torch.int32),
            None,
            1.0 + (n % 4) * 0.2,
            (n % 5) * 0.1,
            (n % 2) * 0.3,
        ),
        adjustments=None,
        truncation=Truncation(5 + n * 3, 0.5 + (n % 5) * 0.1, (n % 4) * 0.05),
    )


def one_position(choice: Choice, row: int) -> Choice:
    rows = slice(row, row + 1)
    assert choice.penalties is not None
    assert choice.truncation is not None
    assert choice.temperature is not None
    assert choice.seed is not None
    penalties = {k: v[rows] for k, v in choice.penalties.__dict__.items() if v is not None}
    return Choice(
        choice.temperature[rows],
        choice.seed[rows],
        Penalties(preceding=None, **penalties),
        None,
        Truncation(**{k: v[rows] for k, v in choice.truncation.__dict__.items()}),
    )


def test_a_position_is_decided_alike_alone_and_in_any_company() -> None:
    num_positions, vocab_size = 24, 515
    logits = torch.randn(num_positions, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    index = torch.arange(num_positions) + 100
    choice = mixed_choice(num_positions, vocab_size)
    together = sample(logits, index, choice).tokens
    for row in range(num_positions):
        alone = sample(logits[row : row + 1], index[row : row + 1], one_position(choice, row)).tokens
        assert int(alone[0]) == int(together[row])


def test_a_greedy_position_is_untouched_by_a_sampled_neighbour() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(6))
    choice = replace(noisy(2), temperature=torch.tensor([0.0, 5.0]))
    for index in range(50):
        tokens = sample(logits, torch.tensor([index, index]), choice).tokens
        assert int(tokens[0]) == int(logits[0].argmax())


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8)) * 4
    tokens = torch.tensor([3, 9, 0])
    result = gather_logprobs(logits, tokens, 4)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(result.chosen.double(), exact[torch.arange(3), tokens], atol=1e-5, rtol=0)
    assert torch.equal(result.top_ids, exact.topk(4, -1).indices)
    torch.testing.assert_close(result.top_values.double(), exact.topk(4, -1).values, atol=1e-5, rtol=0)
