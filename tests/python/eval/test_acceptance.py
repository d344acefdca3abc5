"""The acceptance probe: which rounds it counts, its intervals, its gate, and what it refuses."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem import LLM
from tandem.cli import main
from tandem.engine.speculation import RouteCounts
from tandem.eval.acceptance import (
    AcceptanceReport,
    CountsError,
    Floors,
    NoHitError,
    NothingDraftedError,
    ReducedDraftingError,
    Route,
    measure,
)
from tandem.eval.command import floors_of
from tandem.eval.questions import Question
from tandem.eval.report import Outcome, Report
from tests.python.engine.checkpoint import make_checkpoint, make_drafter

QUESTIONS = [Question(f"{place} and {place}?", str(place), "exact") for place in range(6)]
CLUSTERED = [Question(f"{'text ' * 8}{place}?", "1", "exact", cluster=str(place // 2)) for place in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "model")
    make_drafter(path / "eagle3", seed=1)
    return path


def open_llm(folder: Path, route: Route, **options: object) -> LLM:
    chosen = {"max_speculating_rows": 32, "enable_prefix_cache": route == "prefix-hit"} | options
    return LLM(folder, num_threads=1, **chosen)


def report_of(pairs: Sequence[tuple[int, int]], draft_len: int = 3) -> AcceptanceReport:
    """A report of requests with (accepted, rounds) each."""
    question = QUESTIONS[0]
    accuracy = Report("acceptance", tuple(Outcome(question, "1", True) for _ in pairs))
    num_rounds, accepted = sum(rounds for _, rounds in pairs), sum(accepted for accepted, _ in pairs)
    drafted = (num_rounds,) * draft_len + (0,) * (7 - draft_len)
    counts = RouteCounts(num_rounds, drafted, (accepted,) + (0,) * 6)
    return AcceptanceReport(
        accuracy, "cold", draft_len, counts, tuple((accepted, draft_len * rounds) for accepted, rounds in pairs)
    )


def test_both_routes_see_the_same_prompts_and_rounds(folder: Path) -> None:
    reports = {}
    for route in ("cold", "prefix-hit"):
        with open_llm(folder, route) as llm:
            reports[route] = measure(llm, "acceptance", QUESTIONS, route=route, max_tokens=20)
            stats = llm.stats()
        # What fills the cache drafts nothing, so all rounds of the engine are those of the measurement.
        assert stats.speculation.total == reports[route].counts
        assert (stats.scheduler.num_cached_tokens > 0) == (route == "prefix-hit")
    assert reports["cold"].counts.num_rounds > 6
    assert reports["cold"].counts == reports["prefix-hit"].counts
    assert reports["cold"].by_cluster == reports["prefix-hit"].by_cluster
    assert len(reports["cold"].by_cluster) == len(QUESTIONS)


def test_questions_that_share_a_text_are_resampled_together(folder: Path) -> None:
    with open_llm(folder, "cold") as llm:
        report = measure(llm, "acceptance", CLUSTERED, route="cold", max_tokens=8)
    assert len(report.by_cluster) == 3
    assert sum(drafted for _, drafted in report.by_cluster) == report.counts.total.num_drafted


def test_a_prompt_without_a_hit_is_no_measurement_of_the_route(folder: Path) -> None:
    with (
        open_llm(folder, "cold") as llm,
        pytest.raises(NoHitError, match=r"6 of 6 prompts began with nothing cached .* a hit needs 4 tokens"),
    ):
        measure(llm, "acceptance", QUESTIONS, route="prefix-hit", max_tokens=4)


@pytest.mark.parametrize("options", [{"drafter": None}, {"draft_len": 0}])
def test_without_drafts_there_is_nothing_to_measure(folder: Path, options: dict[str, object]) -> None:
    with open_llm(folder, "cold", **options) as llm, pytest.raises(NothingDraftedError, match="no drafter"):
        measure(llm, "acceptance", QUESTIONS, route="cold")


def test_replies_that_were_drafted_in_part_are_no_measurement(folder: Path) -> None:
    with (
        open_llm(folder, "cold", max_speculating_rows=2) as llm,
        pytest.raises(ReducedDraftingError, match="of 6 replies some steps drafted nothing"),
    ):
        measure(llm, "acceptance", QUESTIONS, route="cold", max_tokens=20)


def test_replies_too_short_for_a_round_are_no_measurement(folder: Path) -> None:
    with open_llm(folder, "cold") as llm, pytest.raises(NothingDraftedError, match="no reply was long enough"):
        measure(llm, "acceptance", QUESTIONS, route="cold", max_tokens=1)


def test_the_length_follows_from_the_rate_with_its_interval() -> None:
    report = report_of([(20, 10), (25, 10), (30, 10), (15, 10)])
    assert (report.rate, report.mean_length) == (90 / 120, 1 + 90 / 40)
    rate, length = report.rate_interval, report.length_interval
    assert rate.low < report.rate < rate.high
    assert (length.low, length.high) == (1 + 3 * rate.low, 1 + 3 * rate.high)
    assert report_of([(20, 10), (25, 10), (30, 10), (15, 10)]).rate_interval == rate
    shown = report.to_dict()
    assert (shown["rounds"], shown["drafted"], shown["accepted"]) == (40, 120, 90)
    assert shown["rate_interval"] == [rate.low, rate.high]
    assert "mean acceptance length 3.250" in str(report)


def test_the_gate_holds_the_lower_bounds_against_both_floors() -> None:
    report = report_of([(20, 10), (25, 10), (30, 10), (15, 10)])
    rate, length = report.rate_interval.low, report.length_interval.low
    assert report.passes(Floors(rate, length))
    assert not report.passes(Floors(rate + 1e-6, length))
    assert not report.passes(Floors(rate, length + 1e-6))
    # The point estimates themselves reach floors that the bounds do not.
    assert not report.passes(Floors(report.rate, 1.0))


@pytest.mark.parametrize(
    ("drafted", "accepted", "by_cluster", "message"),
    [
        ((4, 4, 3), (4, 2, 1), ((7, 12),), "4 rounds of 3 drafts drafted 11"),
        ((4, 4, 4), (4, 2, 1), ((6, 12),), r"requests accepted and drafted \(6, 12\)"),
    ],
)
def test_counts_that_contradict_each_other_are_a_fault_of_the_statistics(
    drafted: tuple[int, ...], accepted: tuple[int, ...], by_cluster: tuple[tuple[int, int], ...], message: str
) -> None:
    accuracy = Report("acceptance", (Outcome(QUESTIONS[0], "1", True),))
    with pytest.raises(CountsError, match=message):
        AcceptanceReport(accuracy, "cold", 3, RouteCounts(4, drafted, accepted), by_cluster)


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    file = folder.parent / "questions.jsonl"
    file.write_text(
        "".join(json.dumps({"question": q.question, "answer": q.answer, "compare": "exact"}) + "\n" for q in QUESTIONS)
    )
    command = ["eval", "acceptance", "--model", str(folder), "--file", str(file), "--max-tokens", "12"]
    code = main([*command, *options])
    return code, capsys.readouterr().out


def test_the_command_exits_with_1_where_a_bound_is_under_its_floor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(folder, capsys, "--gate", "0,1")
    assert (code, "gate passed" in out) == (0, True)
    code, out = run(folder, capsys, "--gate", "0,3.99")
    assert (code, "gate failed" in out) == (1, True)
    code, out = run(folder, capsys, "--gate", "1,1", "--json")
    shown = json.loads(out)
    assert (code, shown["gate"]) == (1, {"rate": 1.0, "length": 1.0, "passed": False})
    assert (shown["questions"], shown["route"], shown["draft_len"]) == (6, "cold", 3)
    assert shown["mean_length"] == pytest.approx(1 + 3 * shown["rate"])
    assert len(shown["rate_by_position"]) == 3


def test_the_command_takes_a_route_a_draft_length_and_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(folder, capsys, "--route", "prefix-hit", "--draft-len", "2", "--json")
    shown = json.loads(out)
    assert (code, shown["route"], shown["draft_len"], shown["drafted"]) == (0, "prefix-hit", 2, 2 * shown["rounds"])
    code, out = run(folder, capsys, "--damage", "draft-kv", "--json")
    assert (code, json.loads(out)["damage"]) == (0, "draft-kv")
    code, out = run(folder, capsys, "--damage", "draft-kv")
    assert out.startswith("damaged draft-kv\n")


@pytest.mark.parametrize("text", ["0.9", "0.9,3,1", "a,b", "1.5,3", "0.9,0.5", "0.9,9", "nan,3"])
def test_a_gate_that_is_no_pair_of_possible_floors_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        floors_of(text)
    assert floors_of("0.87,3.6") == (0.87, 3.6)
