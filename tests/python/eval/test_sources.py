import pytest

from tandem.eval import retrieval_data
from tandem.eval.sources import InvalidCountError, InvalidLengthError, by_cluster, lookups, word_problems


@pytest.fixture
def words():
    """Counts a token per word, so that no tokenizer is needed."""
    return retrieval_data.WordCounter(lambda text: 1)


def test_lookups_hold_their_document_and_the_answer_stands_in_it_once(words):
    questions = lookups(12, 1500, words)
    assert len(questions) == 12
    for question in questions:
        assert question.question.count(f" is {question.answer}.") >= 1
        assert question.is_right(question.answer)
        assert not question.is_right(str(int(question.answer) + 1))
        assert words(question.question.replace("\n", " ")) <= 1500


def test_questions_about_one_document_are_one_cluster_and_each_names_its_home(words):
    groups = by_cluster(lookups(10, 1500, words))
    assert [len(group) for group in groups] == [4, 4, 2]
    for group in groups:
        assert len({question.question.rpartition("\n")[0] for question in group}) == 1
        assert all(question.category.startswith("layer ") for question in group)


def test_the_same_lookups_come_again(words):
    assert lookups(8, 1500, words) == lookups(8, 1500, words)


def test_counts_and_lengths_that_cannot_be_are_refused(words):
    with pytest.raises(InvalidCountError, match="questions=0"):
        lookups(0, 1500, words)
    with pytest.raises(InvalidLengthError, match="tokens=300"):
        lookups(1, 300, words)
    with pytest.raises(InvalidCountError, match="questions=100000000 is not allowed: 1 to"):
        word_problems(100_000_000)


def test_word_problems_are_compared_as_numbers_and_say_whether_they_were_drawn():
    problems = word_problems(50)
    assert len({problem.question for problem in problems}) == 50
    assert all(problem.compare == "number" for problem in problems)
    assert {problem.seen for problem in problems} == {True, False}
