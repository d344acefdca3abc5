"""Greedy decoding with a drafter beside the same without: the text of word problems, the same tokens, one run."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem import demo
from tandem.bench.arms import EngineArm, Prompts, set_threads
from tandem.engine.chat import ChatTemplate
from tandem.engine.tokenizer import Tokenizer
from tandem.models.eagle3_config import find_drafter

NUM_TOKENS = 96
"""Tokens decoded per sequence in a window: word problems whose replies are at least that long are taken."""


class SpeculationError(ValueError):
    """Speculation cannot be measured: there is no drafter, or its text differs, so that nothing was measured."""


@dataclass(frozen=True)
class SpeculationCell:
    """One draft length beside none. `ratio` is of tokens per second, with drafts over without; milliseconds a window.

    `acceptance` is that of the timed windows, as `tandem.engine.speculation` gives it: empty of figures where drafting
    had been reduced to nothing.
    """

    draft_len: int
    batch: int
    threads: int
    tokens_checked: int
    tokens_per_second: float
    plain_tokens_per_second: float
    ratio: float
    ratio_range: tuple[float, float]
    cpu_ratio: float
    """The same ratio in processor time over all threads, of the best windows; other programs change it little."""
    windows_ms: list[float]
    plain_windows_ms: list[float]
    acceptance: dict[str, Any]


@dataclass
class _Arm:
    """An engine with its windows: the tokens of the first one, seconds and processor time of those that were timed."""

    engine: EngineArm
    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """One more timed window. Raises `SpeculationError` where it decodes other tokens than before."""
        window = self.engine.window(NUM_TOKENS)
        if window.tokens != self.tokens:
            raise SpeculationError("an engine decodes other tokens than in its window before")
        self.seconds.append(sum(window.seconds))
        self.cpu_seconds.append(window.cpu_seconds)


def measure(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a cell for each batch, number of threads and draft length, each with its arms run in the order A B B A.

    Raises:
        SpeculationError: the model in `folder` has no drafter, or an arm decodes other tokens.
    """
    drafter = find_drafter("auto", folder)
    if drafter is None:
        raise SpeculationError(f"{folder} holds no drafter: there is no folder eagle3 inside")
    set_threads(max(arguments.threads))
    for batch in arguments.batch:
        plain = _Arm(_engine(folder, None, 0, batch))
        prompts = long_replies(plain.engine, _prompts(folder), batch)
        plain.engine.prepare(prompts)
        plain.tokens = plain.engine.window(NUM_TOKENS).tokens
        for draft_len in arguments.draft_lens:
            drafting = _Arm(_engine(folder, drafter, draft_len, batch))
            drafting.engine.prepare(prompts)
            drafting.tokens = drafting.engine.window(NUM_TOKENS).tokens
            if drafting.tokens != plain.tokens:
                raise SpeculationError(
                    f"with {draft_len} drafts the text of a batch of {batch} differs from that without"
                )
            for threads in arguments.threads:
                set_threads(threads)
                yield asdict(_cell(plain, drafting, draft_len, batch, threads, arguments.rounds))


def long_replies(engine: EngineArm, prompts: Prompts, count: int) -> Prompts:
    """The first `count` prompts whose replies go on beyond the measured tokens.

    Raises `SpeculationError` where there are fewer.
    """
    chosen = []
    for prompt in prompts:
        if engine.reply_length(prompt, NUM_TOKENS + 2) > NUM_TOKENS + 1:
            chosen.append(prompt)
            if len(chosen) == count:
                return chosen
    raise SpeculationError(f"{count} replies of {NUM_TOKENS} tokens are needed, {len(chosen)} are that long")


def _cell(plain: _Arm, drafting: _Arm, draft_len: int, batch: int, threads: int, rounds: int) -> SpeculationCell:
    for arm in (plain, drafting):
        arm.seconds, arm.cpu_seconds = [], []
    before = drafting.engine.speculation()
    for _ in range(rounds):
        for arm in (plain, drafting, drafting, plain):
            arm.run()
    counts = (drafting.engine.speculation() - before).total
    ratios = [a / b for a, b in zip(plain.seconds, drafting.seconds, strict=True)]
    tokens = batch * NUM_TOKENS
    slow, fast = statistics.median(plain.seconds), statistics.median(drafting.seconds)
    cell = SpeculationCell(
        draft_len=draft_len,
        batch=batch,
        threads=threads,
        tokens_checked=tokens,
        tokens_per_second=tokens / fast,
        plain_tokens_per_second=tokens / slow,
        ratio=slow / fast,
        ratio_range=(min(ratios), max(ratios)),
        cpu_ratio=min(plain.cpu_seconds) / min(drafting.cpu_seconds),
        windows_ms=[1e3 * second for second in drafting.seconds],
        plain_windows_ms=[1e3 * second for second in plain.seconds],
        acceptance=counts.to_dict(),
    )
    gain = f"{cell.ratio:.2f} x none, {cell.cpu_ratio:.2f} by CPU time"
    print(f"demo batch {batch} threads {threads}, {draft_len} drafts: {gain}; {counts}", file=sys.stderr)
    return cell


def _engine(folder: Path, drafter: Path | None, draft_len: int, batch: int) -> EngineArm:
    return EngineArm(folder, "float32", 1024, batch, drafter=drafter, draft_len=draft_len)


def _prompts(folder: Path) -> Prompts:
    tokenizer, template = Tokenizer.from_pretrained(folder), ChatTemplate.from_pretrained(folder)
    questions = (problem.question for problem in demo.held_out_word_problems())
    return [template.encode(tokenizer, [{"role": "user", "content": question}]) for question in questions]


def print_table(cells: Sequence[dict[str, Any]]) -> None:
    """The cells for people."""
    print("drafts  batch  threads  tok/s with drafts  without  ratio (range)  by CPU time  mean acceptance length")
    for cell in cells:
        low, high = cell["ratio_range"]
        length = cell["acceptance"].get("mean_length")
        print(
            f"{cell['draft_len']:>6} {cell['batch']:>6} {cell['threads']:>8} {cell['tokens_per_second']:>18.1f}"
            f" {cell['plain_tokens_per_second']:>8.1f}   {cell['ratio']:.2f} ({low:.2f} to {high:.2f})"
            f" {cell['cpu_ratio']:>12.2f}  {'no drafts' if length is None else f'{length:.2f}':>12}"
        )
