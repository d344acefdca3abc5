"""The acceptance probe on the demo pair: both routes alike, and damage to the draft cache seen by it alone."""

import pytest

from tandem import LLM
from tandem.eval.acceptance import WORKED_EXAMPLE, AcceptanceReport, Floors, Route, measure
from tandem.eval.sources import word_problems
from tandem.spec.damage import misread_drafts

FLOORS = Floors(0.87, 3.6)


def probe(num_questions: int, route: Route = "cold", damaged: bool = False) -> AcceptanceReport:
    with LLM(
        "demo",
        num_threads=1,
        max_speculating_rows=32,
        enable_prefix_cache=route == "prefix-hit",
        wrap_attention=misread_drafts if damaged else None,
    ) as llm:
        questions = word_problems(num_questions)
        return measure(llm, "acceptance", questions, route=route, preface=WORKED_EXAMPLE)


def test_routes_accept_alike_and_damage_costs_drafts_and_no_answer() -> None:
    cold, hit, damaged = probe(2), probe(2, "prefix-hit"), probe(2, damaged=True)
    assert cold.counts.num_rounds > 20
    # The same prompts, and every step gives the same bits after a hit.
    assert hit.counts == cold.counts
    assert cold.mean_length > FLOORS.length
    assert damaged.mean_length < 2.6
    assert not damaged.passes(FLOORS)
    assert damaged.accuracy == cold.accuracy


@pytest.mark.soak
def test_the_shipped_pair_passes_its_gate_and_fails_it_when_damaged() -> None:
    cold, hit, damaged = probe(200), probe(200, "prefix-hit"), probe(200, damaged=True)
    assert cold.passes(FLOORS)
    assert hit.passes(FLOORS)
    assert hit.rate_interval.low <= cold.rate_interval.high
    assert cold.rate_interval.low <= hit.rate_interval.high
    assert damaged.accuracy == cold.accuracy
    assert damaged.mean_length < 2.6
    assert not damaged.passes(FLOORS)
