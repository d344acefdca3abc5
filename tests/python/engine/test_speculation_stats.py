"""What is counted of drafts, where, and the figures that follow."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem import LLM
from tandem.cli import main
from tandem.engine.params import SamplingParams
from tandem.engine.speculation import RoundCounts, RouteCounts, SpeculationStats
from tests.python.engine.checkpoint import make_checkpoint, make_drafter
from tests.python.engine.test_speculation import GREEDY, OTHERS, PROMPT, plain, scripted, speculating
from tests.python.engine.tiny_m3 import TinyRig, Variation

SCRIPTS = [[3], [0], [1], [2, 0, 3, 1], [3, 3, 2]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def stats_of(rig: TinyRig) -> SpeculationStats:
    return rig.engine.stats().speculation


def simulated(num_tokens: int, draft_len: int, script: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """(rounds, drafted and accepted by place) of a text whose rounds accept as `script` says, as far as it goes."""
    turns = itertools.cycle(script)
    known, num_rounds, accepted = 1, 0, [0] * 7  # the prefill's own token is no round
    while known < num_tokens:
        kept = min(next(turns), draft_len, num_tokens - known)
        known += kept + 1
        num_rounds += 1
        for place in range(kept):
            accepted[place] += 1
    return num_rounds, [num_rounds] * draft_len + [0] * (7 - draft_len), accepted


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_counts_are_those_of_the_rounds_one_by_one(script: list[int], draft_len: int) -> None:
    rig = scripted(Variation(), draft_len, "greedy", script)
    output = rig.generate(PROMPT, GREEDY)
    num_rounds, drafted, accepted = simulated(len(output.token_ids), draft_len, script)
    cold = stats_of(rig).cold
    assert (cold.num_rounds, list(cold.drafted), list(cold.accepted)) == (num_rounds, drafted, accepted)
    assert stats_of(rig).prefix_hit.num_rounds == 0
    assert output.rounds == cold.total == stats_of(rig).total.total


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_round_that_ends_its_request_counts_all_drafts_and_accepts_those_up_to_the_end(end: str) -> None:
    text = plain("greedy")[0]
    for num_tokens in range(2, 12):
        # The text is followed until a token stops it, the first time that it occurs, or its length does.
        tokens = text.index(text[num_tokens - 1]) + 1 if end == "stop" else num_tokens
        params = replace(
            GREEDY, **({"stop_token_ids": [text[tokens - 1]]} if end == "stop" else {"max_tokens": tokens})
        )
        rig = scripted(Variation(), 5, "greedy", [5])
        output = rig.generate(PROMPT, params)
        assert (output.finish_reason, len(output.token_ids)) == (end, tokens)
        num_rounds, drafted, accepted = simulated(tokens, 5, [5])
        cold = stats_of(rig).cold
        assert (cold.num_rounds, list(cold.drafted), list(cold.accepted)) == (num_rounds, drafted, accepted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_the_mean_length_is_one_and_the_draft_length_times_the_rate(draft_len: int, overlap: bool) -> None:
    for script in SCRIPTS:
        rig = scripted(Variation(overlap=overlap), draft_len, "greedy", script)
        rig.generate(PROMPT, replace(GREEDY, max_tokens=19))
        total = stats_of(rig).total.total
        assert total.num_drafted == draft_len * total.num_rounds
        assert total.rate is not None
        assert total.mean_length == pytest.approx(1 + draft_len * total.rate, abs=1e-12)


def test_rows_that_are_dropped_behind_an_end_are_no_rounds() -> None:
    """With overlap a row is planned behind each end; its result is ignored, and so are its drafts."""
    counts = []
    for overlap in (False, True):
        rig = scripted(Variation(overlap=overlap), 3, "greedy", [3])
        rig.generate(PROMPT, GREEDY)
        counts.append(stats_of(rig))
    assert counts[0] == counts[1]


def test_a_sequence_that_begins_with_cached_tokens_counts_on_the_route_of_hits() -> None:
    rig = speculating(Variation(), 3)
    cold_output = rig.generate(PROMPT, GREEDY)
    before = stats_of(rig)
    assert before.prefix_hit == RouteCounts(0, (0,) * 7, (0,) * 7)
    hit_output = rig.generate(PROMPT, GREEDY)
    assert (cold_output.cached_tokens, hit_output.cached_tokens) == (0, 32)
    since = stats_of(rig) - before
    assert since.cold.num_rounds == 0
    assert since.prefix_hit == before.cold
    assert hit_output.rounds == since.prefix_hit.total


def test_rounds_of_a_preempted_sequence_count_as_hits_once_it_has_come_back() -> None:
    num_preempted = 0
    for delay in range(0, 14, 2):
        rig = speculating(Variation(num_slots=7, chunk=16), 1)
        urgent = rig.submit(OTHERS[1], replace(GREEDY, max_tokens=70))
        for _ in range(delay):
            rig.engine.step()
        victim = rig.submit(PROMPT, replace(GREEDY, priority=1))
        rig.run()
        stats, outputs = stats_of(rig), (urgent.output, victim.output)
        # A sequence that is preempted as soon as it is admitted has drafted nothing before.
        assert (stats.prefix_hit.num_rounds > 0) == (victim.output.num_preemptions > 0)
        assert stats.total.total == RoundCounts(
            sum(output.rounds.num_rounds for output in outputs),
            sum(output.rounds.num_drafted for output in outputs),
            sum(output.rounds.num_accepted for output in outputs),
        )
        num_preempted += victim.output.num_preemptions > 0
    assert num_preempted > 0


def test_without_drafts_nothing_is_counted_and_figures_are_absent() -> None:
    rig = speculating(Variation(), 0)
    output = rig.generate(PROMPT, GREEDY)
    assert stats_of(rig).total.num_rounds == 0
    assert output.rounds.to_dict() == {"rounds": 0, "drafted": 0, "accepted": 0}
    assert stats_of(rig).to_dict()["rate_by_position"] == []
    assert (output.rounds.rate, output.rounds.mean_length) == (None, None)


def test_figures_follow_from_the_counts() -> None:
    counts = RouteCounts(4, (4, 4, 2, 0), (3, 1, 0, 0))
    assert counts.total.to_dict() == {"rounds": 4, "drafted": 10, "accepted": 4, "rate": 0.4, "mean_length": 2.0}
    assert counts.rates == [0.75, 0.25, 0.0]
    assert str(counts) == (
        "4 rounds, 4 of 10 drafts accepted, mean acceptance length 2.000, by position 0.750 0.250 0.000"
    )


def test_the_command_line_shows_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model")
    make_drafter(folder / "eagle3", seed=1)
    command = ["generate", "--model", str(folder), "--num-threads", "1", "--max-tokens", "8", "--prompt", "hello"]
    with LLM(folder, num_threads=1) as llm:
        output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
        expected = llm.stats().speculation.total
    assert main([*command, "--ignore-eos"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"[{expected}]"
    assert main([*command, "--ignore-eos", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["speculation"]
    assert shown == output.rounds.to_dict()
    assert shown["drafted"] == 3 * shown["rounds"] > 0
