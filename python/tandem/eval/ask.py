"""Asks a model questions in its chat form, greedily, and compares its answers with the known ones."""

from collections.abc import Sequence

import tqdm  # type: ignore[import-untyped]

from tandem.engine.chat import Message, ThinkingMode
from tandem.engine.errors import RequestFailedError
from tandem.engine.llm import LLM
from tandem.engine.outputs import RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.tokenizer import THINK_CLOSE
from tandem.eval.questions import Question
from tandem.eval.report import Outcome, Report
from tandem.eval.sources import by_cluster


def final_answer(text: str, thinking_mode: ThinkingMode) -> str:
    """The part of a reply that counts: what follows its reasoning.

    A reply that was opened inside the reasoning and never leaves it gives no answer.
    """
    _, closed, answer = text.rpartition(THINK_CLOSE)
    return "" if thinking_mode == "enabled" and not closed else answer.strip()


def ask(
    llm: LLM,
    name: str,
    questions: Sequence[Question],
    *,
    max_tokens: int = 512,
    thinking_mode: ThinkingMode = "enabled",
    progress: bool = False,
) -> Report:
    """Asks every question as a conversation of its own, and judges the answers.

    Args:
        llm: the model.
        name: of the evaluation, for the report.
        questions: at least one.
        max_tokens: most tokens of a reply, its reasoning included.
        thinking_mode: how the reply is opened.
        progress: show a progress bar where many questions run together.

    Raises:
        RequestFailedError: a request ended by an error of the engine, so that there is no answer to judge.
        tandem.engine.errors.InvalidPromptError: a question does not fit into the model's length.
    """
    outputs = replies(llm, questions, max_tokens=max_tokens, thinking_mode=thinking_mode, progress=progress)
    return judge(name, questions, outputs, thinking_mode)


def replies(
    llm: LLM,
    questions: Sequence[Question],
    *,
    max_tokens: int,
    thinking_mode: ThinkingMode,
    preface: Sequence[Message] = (),
    progress: bool = False,
) -> list[RequestOutput]:
    """The greedy replies, in the order of the questions; arguments as in `ask`, `preface` the turns before each one.

    Questions that stand alone run together. Of those that share a text the first runs before the others, which then
    find its pages in the prefix cache.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def run(some: Sequence[Question], show: bool = False) -> list[RequestOutput]:
        turns: list[list[Message]] = [[*preface, {"role": "user", "content": question.question}] for question in some]
        return llm.chat(turns, params, progress=show, thinking_mode=thinking_mode) if turns else []

    groups = by_cluster(questions)
    if all(len(group) == 1 for group in groups):
        return run(questions, progress)
    bar = tqdm.tqdm(groups, disable=not progress, unit="text", dynamic_ncols=True)
    return [output for group in bar for output in (*run(group[:1]), *run(group[1:]))]


def judge(
    name: str, questions: Sequence[Question], outputs: Sequence[RequestOutput], thinking_mode: ThinkingMode
) -> Report:
    """Compares the answers with the known ones. Raises `RequestFailedError` where there is none to judge."""
    outcomes = []
    for question, output in zip(questions, outputs, strict=True):
        if output.finish_reason == "error":
            raise RequestFailedError(output.request_id, output.error or "no reason given")
        given = final_answer(output.text, thinking_mode)
        outcomes.append(Outcome(question, given, question.is_right(given)))
    return Report(name, tuple(outcomes))
