"""`tandem eval`: accuracy on word problems, retrieval from long documents, or the same for the user's own questions."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.eval.questions import Question, read_questions
from tandem.eval.sources import InvalidCountError

if TYPE_CHECKING:
    # Imported where a command runs, so that --help need not load torch.
    from tandem.engine.llm import LLM

DEFAULT_QUESTIONS = 100
DEFAULT_TOKENS = 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `eval` with its two evaluations; each sets `run`: parsed arguments in, exit code out."""
    evaluations = subparsers.add_parser("eval", help="ask questions with known answers").add_subparsers(
        dest="evaluation", required=True, metavar="EVALUATION"
    )
    accuracy = evaluations.add_parser(
        "accuracy", help="held-out word problems, or your own questions", description=run_accuracy.__doc__
    )
    _add_common(accuracy)
    accuracy.set_defaults(run=run_accuracy)
    retrieval = evaluations.add_parser(
        "retrieval", help="look-ups in long documents, or your own questions", description=run_retrieval.__doc__
    )
    _add_common(retrieval)
    retrieval.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help="length of the generated prompts (default %(default)s)"
    )
    retrieval.add_argument(
        "--damage",
        metavar="index-keys[:LAYER,GROUP]",
        help="debug: let block selection read other pages' index keys, everywhere or in one layer and group",
    )
    retrieval.set_defaults(run=run_retrieval)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model folder, or demo")
    parser.add_argument(
        "--questions", type=int, help=f"how many to ask (default {DEFAULT_QUESTIONS}; with --file, all of them)"
    )
    parser.add_argument(
        "--file", type=Path, help="your questions: one JSON object a line with question, answer and compare"
    )
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of a reply (default %(default)s)")
    parser.add_argument(
        "--thinking",
        choices=("enabled", "disabled", "adaptive"),
        default="enabled",
        help="how the reply is opened (default %(default)s)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_accuracy(arguments: argparse.Namespace) -> int:
    """Asks held-out word problems in the model's chat form, greedily, and compares the answers as numbers."""
    from tandem.engine.llm import LLM
    from tandem.eval.sources import word_problems

    own = _own_questions(arguments)
    questions = word_problems(_count(arguments)) if own is None else own
    with LLM(arguments.model, dtype=arguments.dtype) as llm:
        return _report(llm, arguments, questions)


def run_retrieval(arguments: argparse.Namespace) -> int:
    """Asks for single notes of long generated documents, where only the right blocks hold the answer."""
    from tandem.engine.llm import LLM
    from tandem.eval.damage import IndexKeyDamage
    from tandem.eval.retrieval_data import WordCounter
    from tandem.eval.sources import lookups

    own = _own_questions(arguments)
    damage = None if arguments.damage is None else IndexKeyDamage.parse(arguments.damage)
    wrap = None if damage is None else damage.wrap
    with LLM(arguments.model, dtype=arguments.dtype, wrap_attention=wrap) as llm:
        if own is None:
            counter = WordCounter(lambda text: len(llm.tokenizer.encode(text)))
            own = lookups(_count(arguments), arguments.tokens, counter)
        return _report(llm, arguments, own, damage=arguments.damage)


def _count(arguments: argparse.Namespace) -> int:
    return DEFAULT_QUESTIONS if arguments.questions is None else int(arguments.questions)


def _own_questions(arguments: argparse.Namespace) -> list[Question] | None:
    """The first `--questions` of `--file`; None without a file."""
    if arguments.file is None:
        return None
    questions = read_questions(arguments.file)
    count = len(questions) if arguments.questions is None else int(arguments.questions)
    if not 1 <= count <= len(questions):
        raise InvalidCountError(f"questions={count} is not allowed: 1 to {len(questions)}")
    return questions[:count]


def _report(llm: LLM, arguments: argparse.Namespace, questions: list[Question], damage: str | None = None) -> int:
    from tandem.eval.ask import ask

    report = ask(
        llm,
        arguments.evaluation,
        questions,
        max_tokens=arguments.max_tokens,
        thinking_mode=arguments.thinking,
        progress=sys.stderr.isatty(),
    )
    if arguments.json:
        print(json.dumps(report.to_dict() | ({} if damage is None else {"damage": damage})))
    else:
        print(report if damage is None else f"damaged {damage}\n{report}")
    return 0
