"""Word problems: the `gsm_symbolic` templates of `reasoning-gym` (Apache-2.0), with solutions a small model can follow.

Only the template modules of that package are used. Importing the package itself would pull in all of its other data
sets and their requirements, so its root and its factory are stood in for.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

TRAIN_SEED = 1_000_000_000
TRAIN_SIZE = 4_000_000
HELD_OUT_SEED = 5_000_000_000
HELD_OUT_SIZE = 1000
"""Item i of a range draws from `Random(seed + i)`, so the seeds are further apart than either range is long."""


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution and the bare answer."""

    question: str
    solution: str
    answer: str

    def digest(self) -> bytes:
        """Return a hash of the question, by which held-out texts are kept out of training."""
        return hashlib.blake2b(self.question.encode(), digest_size=8).digest()


class ProblemSource:
    """Random access to the `size` problems of one seed, the very ones of `gsm_symbolic` under that seed and size."""

    def __init__(self, seed: int, size: int) -> None:
        module = _data_set_module()
        self._items = module.GSMSymbolicDataset(module.GSMSymbolicDatasetConfig(seed=seed, size=size))

    def template(self, index: int) -> int:
        """Return the number of the template that item `index` comes from."""
        return int(self._items.task_indices[index])

    def __getitem__(self, index: int) -> Problem:
        item = self._items[index]
        return Problem(
            question=item["question"],
            solution=worked_solution(item["metadata"]["answer_cot"]),
            answer=plain_number(str(item["answer"])),
        )


def worked_solution(text: str) -> str:
    """Return the solution without its `####` line, with short numbers and with intermediate results written out.

    A result that a full stop or comma follows is left alone, as in the texts that the shipped weights learned from.
    """
    body = text.split("####")[0].strip()
    body = _DECIMAL.sub(lambda match: plain_number(match.group(0)), body)
    return "\n".join(_work_out(_claim_last(line)) for line in body.split("\n"))


def plain_number(text: str) -> str:
    """Round a decimal number to three places and drop a trailing `.0`; leave any other text alone."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        return text
    if "." not in text and "E" not in text.upper():
        return text
    return _format(round(value, 3))


_DECIMAL = re.compile(r"\d+\.\d+")
_NUMBER = r"[£€$]?\d+(?:\.\d+)?"
_BECAUSE = re.compile(r"^(?P<claim>[A-Z].*) because (?P<sum>[£€$]?\d.*=.*)$")
_PRODUCT = re.compile(
    rf"(?<![\d.+*/x×-])(?P<a>{_NUMBER})(?P<mid>[^=\d\n+/()%-]*?[*x×] ?)"
    rf"(?P<b>{_NUMBER})(?P<end>[^=\d\n+*/x×%()-]*?= ?)(?P<c>{_NUMBER})(?![\d.,/])"
)
_CHAIN = re.compile(
    rf"(?P<terms>{_NUMBER}(?:[^=\d\n+*/x×%().:,-]*[+-] ?{_NUMBER}){{2,}})"
    rf"(?P<end>[^=\d\n+*/x×%()-]*= ?)(?P<c>{_NUMBER})(?![\d.,/])"
)
_TERM = re.compile(rf"(?P<sign>[+-]?) ?(?P<number>{_NUMBER})")


def _claim_last(line: str) -> str:
    """Put a result that is stated before its calculation after it."""
    match = _BECAUSE.match(line)
    return f"{match['sum']}. {match['claim']}." if match else line


def _work_out(line: str) -> str:
    return _CHAIN.sub(_running_sums, _PRODUCT.sub(_partial_products, line))


def _value(text: str) -> Decimal:
    return Decimal(text.lstrip("£€$"))


def _format(value: Decimal) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _digit_values(value: Decimal) -> list[Decimal]:
    """Split a number into its non-zero digits times their powers of ten: 5.25 into 5, 0.2 and 0.05."""
    _, digits, exponent = value.normalize().as_tuple()
    last = len(digits) - 1
    return [Decimal(digit).scaleb(int(exponent) + last - i) for i, digit in enumerate(digits) if digit]


def _partial_products(match: re.Match[str]) -> str:
    a, b, c = _value(match["a"]), _value(match["b"]), _value(match["c"])
    if a * b != c:
        return match.group(0)
    split, other = sorted((_digit_values(a), _digit_values(b)), key=len)
    if len(split) < 2:
        return match.group(0)
    parts = [part * sum(other) for part in split]
    return f"{match['a']}{match['mid']}{match['b']}{match['end']}{'+'.join(map(_format, parts))}={match['c']}"


def _running_sums(match: re.Match[str]) -> str:
    terms = [(-1 if term["sign"] == "-" else 1) * _value(term["number"]) for term in _TERM.finditer(match["terms"])]
    if sum(terms) != _value(match["c"]) or max(map(abs, terms)) < 10:
        return match.group(0)
    steps = []
    while len(terms) > 2:
        terms = [terms[0] + terms[1], *terms[2:]]
        steps.append(
            _format(terms[0]) + "".join(f"{'-' if term < 0 else '+'}{_format(abs(term))}" for term in terms[1:])
        )
    return f"{match['terms']}{match['end']}{'='.join(steps)}={match['c']}"


class _DataSet:
    """What the data set class needs of its base."""

    def __init__(self, config: Any, seed: int, size: int) -> None:
        self.config, self.seed, self.size = config, seed, size


def _data_set_module() -> ModuleType:
    found = importlib.util.find_spec("reasoning_gym")
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError("the word problems need the package `reasoning-gym` (0.1.25) on the Python path")
    root = Path(next(iter(found.submodule_search_locations)))
    for name, folder in (("reasoning_gym", root), ("reasoning_gym.arithmetic", root / "arithmetic")):
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            package.__spec__ = ModuleSpec(name, None, is_package=True)
            package.__spec__.submodule_search_locations = [str(folder)]
            sys.modules[name] = package
    if "reasoning_gym.factory" not in sys.modules:
        factory = ModuleType("reasoning_gym.factory")
        factory.__dict__.update(ProceduralDataset=_DataSet, register_dataset=lambda *_: None)
        sys.modules["reasoning_gym.factory"] = factory
    return importlib.import_module("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic")
