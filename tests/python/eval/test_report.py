import json

import pytest

from tandem.eval.questions import Question
from tandem.eval.report import Outcome, Report
from tandem.eval.stats import bootstrap_share, wilson


def outcome(right, **fields):
    return Outcome(Question("q", "1", "number", **fields), "1" if right else "2", right)


def test_the_total_counts_every_question_and_carries_wilsons_interval():
    report = Report("accuracy", tuple(outcome(i < 9) for i in range(10)))
    assert report.total.accuracy == pytest.approx(0.9)
    assert report.total.interval == wilson(9, 10)
    found = json.loads(json.dumps(report.to_dict()))
    assert found.keys() == {"evaluation", "questions", "accuracy", "interval"}
    assert found["questions"] == 10
    assert found["interval"] == [wilson(9, 10).low, wilson(9, 10).high]


def test_unseen_texts_are_told_apart_where_the_data_marks_them():
    outcomes = [outcome(True, seen=True)] * 6 + [outcome(False, seen=False)] + [outcome(True, seen=False)] * 3
    report = Report("accuracy", tuple(outcomes))
    assert (report.seen.questions, report.seen.accuracy) == (6, 1.0)
    assert (report.unseen.questions, report.unseen.accuracy) == (4, 0.75)
    assert report.to_dict()["unseen"]["questions"] == 4
    assert "unseen texts: 0.750 of 4" in str(report)


def test_questions_of_one_document_count_as_one_cluster():
    clusters = [[True] * 4, [False] * 4, [True, True, False, True]]
    outcomes = [outcome(r, cluster=str(i)) for i, cluster in enumerate(clusters) for r in cluster]
    assert Report("retrieval", tuple(outcomes)).total.interval == bootstrap_share(clusters)


def test_each_category_gets_its_own_share():
    report = Report(
        "retrieval", (outcome(True, category="b"), outcome(False, category="a"), outcome(True, category="a"))
    )
    assert list(report.categories) == ["a", "b"]
    assert report.to_dict()["categories"]["a"]["accuracy"] == 0.5
