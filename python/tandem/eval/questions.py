"""Questions with known answers, and how a model's answer is compared with the known one."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

_NUMBER = re.compile(r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-−]?\.\d+")
_CHOICE = re.compile(r"\(([A-Za-z])\)|(?<![A-Za-z])([A-Z])(?![A-Za-z])")
_TOLERANCE = Decimal("1e-6")


class InvalidQuestionError(ValueError):
    """A line of a question file that cannot be used; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question: the text of the user's turn.
        answer: the known answer.
        compare: a key of `COMPARISONS`.
        seen: whether the model's training may have met this text; None where the data does not say.
        cluster: questions of one cluster share text, so their outcomes depend on each other; None stands alone.
        category: a name to report apart; None is reported only in the total.
    """

    question: str
    answer: str
    compare: str
    seen: bool | None = None
    cluster: str | None = None
    category: str | None = None

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise ValueError(f"compare={self.compare!r} is not allowed: one of {', '.join(COMPARISONS)}")
        if not self.question.strip():
            raise ValueError("the question is empty")
        if not self.answer.strip():
            raise ValueError("the answer is empty")
        if self.compare == "number" and _last_number(self.answer) is None:
            raise ValueError(f"answer={self.answer!r} holds no number to compare with")
        if self.compare == "choice" and _last_choice(self.answer) is None:
            raise ValueError(f"answer={self.answer!r} names no choice (one letter)")

    def is_right(self, given: str) -> bool:
        """Whether `given`, the model's answer without its reasoning, agrees with the known one."""
        return COMPARISONS[self.compare](given, self.answer)


def _exact(given: str, known: str) -> bool:
    return given.split() == known.split()


def _contains(given: str, known: str) -> bool:
    return " ".join(known.casefold().split()) in " ".join(given.casefold().split())


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def _number(given: str, known: str) -> bool:
    left, right = _last_number(given), _last_number(known)
    if left is None or right is None:
        return False
    return abs(left - right) <= _TOLERANCE * max(Decimal(1), abs(right))


def _last_choice(text: str) -> str | None:
    stripped = text.strip().rstrip(".)").lstrip("(")
    if len(stripped) == 1 and stripped.isalpha():
        return stripped.upper()
    found = [first or second for first, second in _CHOICE.findall(text)]
    return found[-1].upper() if found else None


def _choice(given: str, known: str) -> bool:
    choice = _last_choice(given)
    return choice is not None and choice == _last_choice(known)


COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "exact": _exact,
    "number": _number,
    "contains": _contains,
    "choice": _choice,
}
"""Ways to compare (given, known), by name.

`exact`: the same words; `number`: the last number of each, to a relative 1e-6, thousands commas left out; `contains`:
the known answer occurs in the given one, case and spacing aside; `choice`: the last single capital letter, or letter
in brackets, of each.
"""

_TYPES: dict[str, type] = {
    "question": str,
    "answer": str,
    "compare": str,
    "seen": bool,
    "cluster": str,
    "category": str,
}


def read_questions(path: Path) -> list[Question]:
    """Reads a file with one JSON object a line: `question`, `answer`, `compare`, and what else `Question` has.

    Raises:
        FileNotFoundError: there is no such file.
        InvalidQuestionError: a line is not such an object, or the file is no text or holds no question.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidQuestionError(f"{path} is not UTF-8 text: {error}") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            questions.append(_question_of(json.loads(line)))
        except ValueError as error:
            raise InvalidQuestionError(f"{path}:{number}: {error}") from error
    if not questions:
        raise InvalidQuestionError(f"{path} holds no question")
    return questions


def _question_of(entry: object) -> Question:
    if not isinstance(entry, dict):
        raise ValueError(f"a line must be a JSON object, not {type(entry).__name__}")
    unknown = sorted(entry.keys() - _TYPES.keys())
    if unknown:
        raise ValueError(f"keys {unknown} are not known: {', '.join(_TYPES)}")
    missing = [key for key in ("question", "answer", "compare") if key not in entry]
    if missing:
        raise ValueError(f"keys {missing} are missing")
    for key, value in entry.items():
        if not isinstance(value, _TYPES[key]):
            raise ValueError(f"{key}={value!r} is not allowed: a {_TYPES[key].__name__}")
    return Question(**entry)
