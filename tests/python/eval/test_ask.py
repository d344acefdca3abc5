import pytest

from tandem.engine.errors import RequestFailedError
from tandem.engine.outputs import RequestOutput
from tandem.eval.ask import ask, final_answer
from tandem.eval.questions import Question


class FakeLLM:
    """Answers each question by a table, and remembers which ran together."""

    def __init__(self, answers, finish_reason="stop"):
        self.answers = answers
        self.finish_reason = finish_reason
        self.batches = []

    def chat(self, conversations, params, *, progress, thinking_mode):
        assert params.greedy
        questions = [turns[-1]["content"] for turns in conversations]
        self.batches.append(questions)
        return [
            RequestOutput(number, None, [1], self.answers[question], [1], 0, self.finish_reason)
            for number, question in enumerate(questions)
        ]


@pytest.mark.parametrize(
    ("text", "mode", "answer"),
    [
        ("2+2 is 4</mm:think>\n4 ", "enabled", "4"),
        ("so 4", "enabled", ""),
        ("4", "disabled", "4"),
        ("<mm:think>a</mm:think>4", "adaptive", "4"),
        ("4", "adaptive", "4"),
        ("a</mm:think>b</mm:think>c", "enabled", "c"),
    ],
)
def test_only_what_follows_the_reasoning_is_the_answer(text, mode, answer):
    assert final_answer(text, mode) == answer


def test_answers_are_judged_in_the_order_of_the_questions():
    llm = FakeLLM({"a": "x</mm:think>1", "b": "x</mm:think>3", "c": "2"})
    questions = [Question("a", "1", "number"), Question("b", "2", "number"), Question("c", "2", "number")]
    report = ask(llm, "accuracy", questions)
    assert [outcome.right for outcome in report.outcomes] == [True, False, False]
    assert [outcome.given for outcome in report.outcomes] == ["1", "3", ""]
    assert llm.batches == [["a", "b", "c"]]


def test_the_first_question_about_a_text_runs_before_the_others_that_share_it():
    names = ["a1", "a2", "a3", "alone", "b1", "b2"]
    clusters = ["a", "a", "a", None, "b", "b"]
    llm = FakeLLM({name: f"</mm:think>{name}" for name in names})
    questions = [Question(name, name, "exact", cluster=c) for name, c in zip(names, clusters, strict=True)]
    report = ask(llm, "retrieval", questions)
    assert llm.batches == [["a1"], ["a2", "a3"], ["alone"], ["b1"], ["b2"]]
    assert report.total.accuracy == 1.0
    assert [outcome.question.question for outcome in report.outcomes] == names


def test_a_request_that_the_engine_failed_is_an_error_and_not_a_wrong_answer():
    llm = FakeLLM({"a": ""}, finish_reason="error")
    with pytest.raises(RequestFailedError):
        ask(llm, "accuracy", [Question("a", "1", "number")])
