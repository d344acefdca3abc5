"""`tandem eval`: accuracy, retrieval from long documents, and how many drafts are accepted."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.engine.command import add_drafter_option, drafter_of
from tandem.eval.questions import Question, read_questions
from tandem.eval.sources import InvalidCountError

if TYPE_CHECKING:
    # Imported where a command runs, so that --help need not load torch.
    from tandem.engine.llm import LLM
    from tandem.eval.acceptance import AcceptanceReport, Floors

DEFAULT_QUESTIONS = 100
DEFAULT_TOKENS = 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `eval` with its evaluations; each sets `run`: parsed arguments in, exit code out."""
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
    acceptance = evaluations.add_parser(
        "acceptance", help="how many of a drafter's tokens are accepted", description=run_acceptance.__doc__
    )
    _add_common(acceptance)
    acceptance.add_argument(
        "--task", choices=("word-problems", "retrieval"), default="word-problems", help="default %(default)s"
    )
    acceptance.add_argument(
        "--length", type=int, default=DEFAULT_TOKENS, help="tokens of the retrieval prompts (default %(default)s)"
    )
    acceptance.add_argument("--draft-len", type=int, help="drafts of a round, 1 to 7 (default 3)")
    acceptance.add_argument(
        "--route",
        choices=("cold", "prefix-hit"),
        default="cold",
        help="whether prompts begin with nothing cached, or with their pages (default %(default)s)",
    )
    acceptance.add_argument(
        "--gate",
        type=floors_of,
        metavar="RATE,LENGTH",
        help="exit with 1 unless the lower bounds of acceptance rate and mean acceptance length reach these",
    )
    acceptance.add_argument(
        "--damage",
        choices=("draft-kv",),
        help="debug: let the drafter read its pages as a transfer would leave them that mixes heads with tokens",
    )
    acceptance.set_defaults(run=run_acceptance)


def floors_of(text: str) -> tuple[float, float]:
    """The rate and the length in ``"RATE,LENGTH"``."""
    parts = text.split(",")
    try:
        rate, length = (float(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not RATE,LENGTH, such as 0.87,3.6") from None
    if not (0 <= rate <= 1 and 1 <= length <= 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a rate of 0 to 1 and a length of 1 to 8")
    return rate, length


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
    add_drafter_option(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_accuracy(arguments: argparse.Namespace) -> int:
    """Asks held-out word problems in the model's chat form, greedily, and compares the answers as numbers."""
    from tandem.engine.llm import LLM
    from tandem.eval.sources import word_problems

    own = _own_questions(arguments)
    questions = word_problems(_count(arguments)) if own is None else own
    with LLM(arguments.model, drafter=drafter_of(arguments), dtype=arguments.dtype) as llm:
        return _report(llm, arguments, questions)


def run_retrieval(arguments: argparse.Namespace) -> int:
    """Asks for single notes of long generated documents, where only the right blocks hold the answer."""
    from tandem.engine.llm import LLM
    from tandem.eval.damage import IndexKeyDamage

    own = _own_questions(arguments)
    damage = None if arguments.damage is None else IndexKeyDamage.parse(arguments.damage)
    wrap = None if damage is None else damage.wrap
    drafter = drafter_of(arguments)
    with LLM(arguments.model, drafter=drafter, dtype=arguments.dtype, wrap_attention=wrap) as llm:
        questions = _lookups(llm, _count(arguments), arguments.tokens) if own is None else own
        return _report(llm, arguments, questions, damage=arguments.damage)


def run_acceptance(arguments: argparse.Namespace) -> int:
    """Counts the accepted drafts while held-out questions are answered greedily; 95 % intervals are by prompt."""
    from tandem.engine.limits import DEFAULT_MAX_SEATS
    from tandem.engine.llm import LLM
    from tandem.eval.acceptance import WORKED_EXAMPLE, Floors, measure
    from tandem.eval.sources import word_problems
    from tandem.spec.damage import misread_drafts

    own = _own_questions(arguments)
    with LLM(
        arguments.model,
        drafter=drafter_of(arguments),
        draft_len=arguments.draft_len,
        dtype=arguments.dtype,
        max_seats=DEFAULT_MAX_SEATS,
        max_speculating_rows=DEFAULT_MAX_SEATS,
        enable_prefix_cache=arguments.route == "prefix-hit",
        wrap_attention=None if arguments.damage is None else misread_drafts,
    ) as llm:
        if own is not None:
            questions = own
        elif arguments.task == "retrieval":
            questions = _lookups(llm, _count(arguments), arguments.length)
        else:
            questions = word_problems(_count(arguments))
        report = measure(
            llm,
            "acceptance",
            questions,
            route=arguments.route,
            max_tokens=arguments.max_tokens,
            thinking_mode=arguments.thinking,
            preface=WORKED_EXAMPLE if own is None and arguments.task == "word-problems" else (),
            progress=sys.stderr.isatty(),
        )
    return _gate(arguments, report, None if arguments.gate is None else Floors(*arguments.gate))


def _gate(arguments: argparse.Namespace, report: AcceptanceReport, floors: Floors | None) -> int:
    passed = floors is None or report.passes(floors)
    if arguments.json:
        gate = {} if floors is None else {"gate": {"rate": floors.rate, "length": floors.length, "passed": passed}}
        damage = {} if arguments.damage is None else {"damage": arguments.damage}
        print(json.dumps(report.to_dict() | gate | damage))
    else:
        print(report if arguments.damage is None else f"damaged {arguments.damage}\n{report}")
        if floors is not None:
            outcome = "passed" if passed else "failed"
            print(f"  gate {outcome}: lower bounds of at least {floors.rate} and {floors.length} are asked for")
    return 0 if passed else 1


def _lookups(llm: LLM, count: int, num_tokens: int) -> list[Question]:
    from tandem.eval.retrieval_data import WordCounter
    from tandem.eval.sources import lookups

    return lookups(count, num_tokens, WordCounter(lambda text: len(llm.tokenizer.encode(text))))


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
        found = report.to_dict() | {"speculation": llm.stats().speculation.to_dict()}
        print(json.dumps(found | ({} if damage is None else {"damage": damage})))
    else:
        print(report if damage is None else f"damaged {damage}\n{report}")
    return 0
