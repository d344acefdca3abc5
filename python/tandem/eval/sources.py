"""The questions that ship with the package: held-out word problems, and look-ups in generated documents."""

import itertools
from collections.abc import Iterator, Sequence

from tandem import demo
from tandem.eval import retrieval_data
from tandem.eval.questions import Question

QUESTIONS_PER_DOCUMENT = 4
"""Look-ups asked of one document: they share its cached prefix, so four cost little more than one."""


class InvalidCountError(ValueError):
    """More questions were asked for than there are, or fewer than one."""


class InvalidLengthError(ValueError):
    """A document of the asked length has no room for what the questions need."""


def word_problems(count: int) -> list[Question]:
    """The first `count` word problems that no training text contains.

    Those whose text came up while the training set was drawn, and was left out there, count as seen: training met
    their near relatives.

    Raises:
        InvalidCountError: `count` is not between 1 and the number of problems.
    """
    problems = demo.held_out_word_problems()
    if not 1 <= count <= len(problems):
        raise InvalidCountError(f"questions={count} is not allowed: 1 to {len(problems)}")
    return [Question(p.question, p.answer, "number", seen=p.drawn) for p in problems[:count]]


def lookups(count: int, num_tokens: int, count_tokens: retrieval_data.WordCounter) -> list[Question]:
    """`count` questions about generated documents, each with its document before it, `num_tokens` tokens at most.

    Questions about one document are neighbours and form a cluster. The category names the note's subject and its
    home in the demo model.

    Raises:
        InvalidCountError: `count` is less than 1.
        InvalidLengthError: a document of `num_tokens` tokens has no room for a note out of reach of its end.
    """
    if count < 1:
        raise InvalidCountError(f"questions={count} is not allowed: 1 or more")
    try:
        return list(itertools.islice(_every_lookup(count, num_tokens, count_tokens), count))
    except ValueError as error:
        raise InvalidLengthError(f"tokens={num_tokens} is not allowed: {error}") from error


def _every_lookup(count: int, num_tokens: int, count_tokens: retrieval_data.WordCounter) -> Iterator[Question]:
    documents = retrieval_data.held_out_documents(num_tokens, count, count_tokens, num_questions=QUESTIONS_PER_DOCUMENT)
    for number, document in enumerate(documents):
        for note in document.asked:
            text = f"{document.text}\n{note.question}"
            yield Question(text, note.digits, "exact", cluster=str(number), category=_category(note))


def _category(note: retrieval_data.Note) -> str:
    layer, group = note.home
    return f"layer {layer}, group {group}: {retrieval_data.CATEGORY_NAMES[note.category]}"


def by_cluster(questions: Sequence[Question]) -> list[list[Question]]:
    """Groups neighbours of one cluster; a question without one stands alone."""
    groups: list[list[Question]] = []
    for question in questions:
        if groups and question.cluster is not None and groups[-1][-1].cluster == question.cluster:
            groups[-1].append(question)
        else:
            groups.append([question])
    return groups
