import json

import pytest

from tandem.eval.questions import InvalidQuestionError, Question, read_questions


@pytest.mark.parametrize(
    ("compare", "known", "given", "right"),
    [
        ("exact", "4821", " 4821\n", True),
        ("exact", "0042", "42", False),
        ("exact", "two words", "two  words", True),
        ("exact", "Paris", "paris", False),
        ("contains", "new york", "It is New\nYork, I think.", True),
        ("contains", "new york", "New Jersey", False),
        ("number", "24", "24", True),
        ("number", "24", "The answer is 24.", True),
        ("number", "24", "24.0", True),
        ("number", "24", "3 x 8 = 24", True),
        ("number", "24", "24 or 25", False),
        ("number", "1234.5", "$1,234.50", True),
        ("number", "12,345", "12345", True),
        ("number", "-5", "−5", True),
        ("number", "-5", "5", False),
        ("number", "0.5", ".5", True),
        ("number", "24", "twenty-four", False),
        ("number", "1000000", "1000000.5", True),
        ("number", "1000000", "1000002", False),
        ("choice", "B", "(b)", True),
        ("choice", "b", "B.", True),
        ("choice", "B", "The answer is B", True),
        ("choice", "B", "A is wrong, so C", False),
        ("choice", "B", "none of them", False),
    ],
)
def test_each_comparison_judges_as_a_reader_would(compare, known, given, right):
    assert Question("q", known, compare).is_right(given) is right


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (("q", "4", "like"), "exact, number, contains, choice"),
        ((" ", "4", "exact"), "question is empty"),
        (("q", "", "exact"), "answer is empty"),
        (("q", "four", "number"), "no number"),
        (("q", "maybe", "choice"), "one letter"),
    ],
)
def test_a_question_that_could_never_be_answered_is_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        Question(*fields)


def test_a_file_gives_its_questions_in_order_and_skips_empty_lines(tmp_path):
    path = tmp_path / "questions.jsonl"
    first = {"question": "1+1?", "answer": "2", "compare": "number"}
    second = {"question": "Sky?", "answer": "blue", "compare": "contains", "seen": False, "cluster": "c"}
    path.write_text(json.dumps(first) + "\n\n" + json.dumps(second) + "\n")
    assert read_questions(path) == [Question(**first), Question(**second)]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "Expecting"),
        ("[]", "JSON object, not list"),
        ('{"question": "q", "answer": "a"}', "'compare'"),
        ('{"question": "q", "answer": 4, "compare": "number"}', "answer=4 is not allowed: a str"),
        ('{"question": "q", "answer": "4", "compare": "number", "hint": "h"}', "'hint'"),
        ('{"question": "q", "answer": "4", "compare": "like"}', "'like'"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, word):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q", "answer": "4", "compare": "number"}\n' + line + "\n")
    with pytest.raises(InvalidQuestionError, match=word) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}:2:")


def test_a_file_without_questions_is_refused(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n")
    with pytest.raises(InvalidQuestionError, match="holds no question"):
        read_questions(path)
