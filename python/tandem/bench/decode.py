"""Greedy decoding beside transformers: same weights, same prompts, same tokens, one run."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tandem import demo
from tandem.bench import environment, speculation, transformers_model
from tandem.bench.arms import Arm, EngineArm, TransformersArm, Window, set_threads
from tandem.bench.checkpoint import (
    bytes_read_per_step,
    cache_bytes_read_per_step,
    num_parameters,
    write_random_checkpoint,
)
from tandem.core import layout
from tandem.models import MiniMaxM3Config

# Two correct implementations may choose differently where the best two logits are closer than this.
NEAR_TIE = 0.01


class WrongTokensError(ValueError):
    """An arm decoded other tokens than the one it is compared with; nothing was measured."""


@dataclass(frozen=True)
class Timing:
    """One arm in one cell. `steps` are the medians in milliseconds of its windows, in the order they ran."""

    tokens_per_second: float
    step_ms: float
    step_ms_quartiles: tuple[float, float]
    cpu_ms: float
    """Processor time of a step over all threads, mean of the best window."""
    windows_ms: list[float]


@dataclass(frozen=True)
class Cell:
    """One comparison. `ratio` is of tokens per second, ours over theirs; its range is over neighbouring windows."""

    model: str
    parameters: int
    batch: int
    context: int
    threads: int
    tokens_checked: int
    tandem: Timing
    transformers: Timing
    ratio: float
    cpu_ratio: float
    """The same ratio in processor time."""
    ratio_range: tuple[float, float]
    kv_dtype: str
    """Type of our cache; transformers' is float32."""
    weight_bytes: int
    cache_bytes: int
    """Of the cache, read by all sequences of a step."""
    read_gb_per_second: float
    floor_ms: float
    """Time to read both once, at the rate just measured over as many bytes."""


def main(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    report = run(arguments)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report)
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell and return the report as JSON values.

    Raises:
        TransformersMissingError: there is nothing to compare with.
        WrongTokensError: the arms decode different tokens.
        SpeculationError: as from `speculation.measure`.
    """
    report: dict[str, Any] = {"environment": environment.describe(), "cells": [], "speculation": []}
    if "transformers" in arguments.compare:
        transformers_model.require()
    if "speculation" in arguments.compare:
        report["speculation"] += speculation.measure(demo.path(), arguments)
    if "transformers" not in arguments.compare:
        return report
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            folder = demo.path() if model == "demo" else write_random_checkpoint(Path(scratch) / model)
            report["cells"] += [asdict(cell) for cell in _cells(model, folder, arguments)]
    return report


def _cells(model: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Cell]:
    config = MiniMaxM3Config.from_pretrained(folder)
    parameters, weight_bytes = num_parameters(config), bytes_read_per_step(config)
    longest = max(arguments.context) + arguments.tokens + 2
    set_threads(max(arguments.threads))
    ours = EngineArm(folder, "float32", longest, max(arguments.batch), kv_dtype=arguments.kv_dtype)
    element = layout.ElementType.BF16 if arguments.kv_dtype == "bfloat16" else layout.ElementType.FP32
    theirs = TransformersArm(folder, torch.float32)
    for context in arguments.context:
        for batch in arguments.batch:
            set_threads(max(arguments.threads))
            prompts = _prompts(batch, context, config.vocab_size)
            cache_bytes = batch * cache_bytes_read_per_step(config, context, element)
            for arm in (ours, theirs):
                arm.prepare(prompts)
            expected = theirs.window(arguments.tokens)
            checked = check_same(ours.window(arguments.tokens), expected, theirs.margins)
            for threads in arguments.threads:
                set_threads(threads)
                first, second = _interleave(ours, theirs, arguments.tokens, arguments.rounds)
                for window in second:
                    check_same(window, expected, theirs.margins)
                rate = read_rate(weight_bytes + cache_bytes)
                mine, other = summarise(first, batch), summarise(second, batch)
                cell = Cell(
                    model=model,
                    parameters=parameters,
                    batch=batch,
                    context=context,
                    threads=threads,
                    tokens_checked=checked,
                    tandem=mine,
                    transformers=other,
                    ratio=other.step_ms / mine.step_ms,
                    cpu_ratio=other.cpu_ms / mine.cpu_ms,
                    ratio_range=_ratio_range(first, second),
                    kv_dtype=arguments.kv_dtype,
                    weight_bytes=weight_bytes,
                    cache_bytes=cache_bytes,
                    read_gb_per_second=rate / 1e9,
                    floor_ms=(weight_bytes + cache_bytes) / rate * 1e3,
                )
                where = f"{model} batch {batch} context {context} threads {threads}"
                print(f"{where}: {cell.ratio:.1f} x transformers, {cell.cpu_ratio:.1f} by CPU time", file=sys.stderr)
                yield cell


def _prompts(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(batch * 1_000_003 + context)
    return [[rng.randrange(16, vocab_size) for _ in range(context)] for _ in range(batch)]


def _interleave(ours: Arm, theirs: Arm, tokens: int, rounds: int) -> tuple[list[Window], list[Window]]:
    """Windows of both arms, run in the order A B B A."""
    mine, other = [], []
    ours.window(2)
    theirs.window(2)
    for _ in range(rounds):
        mine.append(ours.window(tokens))
        other.append(theirs.window(tokens))
        other.append(theirs.window(tokens))
        mine.append(ours.window(tokens))
    return mine, other


def check_same(got: Window, want: Window, margins: Sequence[Sequence[float]]) -> int:
    """How many tokens were compared; a sequence is followed up to its first near tie.

    Raises `WrongTokensError` where a token differs though the choice was clear.
    """
    compared = 0
    for row, (mine, other) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        for place, (a, b) in enumerate(zip(mine, other, strict=True)):
            if a != b:
                margin = margins[row][place]
                if margin > NEAR_TIE:
                    raise WrongTokensError(
                        f"sequence {row} decodes token {a} at step {place}, transformers {b} by {margin:.3f}"
                    )
                break
            compared += 1
    return compared


def summarise(windows: Sequence[Window], batch: int) -> Timing:
    """Medians over all steps of an arm's windows."""
    steps = sorted(second * 1e3 for window in windows for second in window.seconds)
    quartiles = statistics.quantiles(steps, n=4)
    median = statistics.median(steps)
    per_window = [statistics.median(window.seconds) * 1e3 for window in windows]
    cpu_ms = min(window.cpu_seconds / len(window.seconds) * 1e3 for window in windows)
    return Timing(batch * 1e3 / median, median, (quartiles[0], quartiles[2]), cpu_ms, per_window)


def _ratio_range(ours: Sequence[Window], theirs: Sequence[Window]) -> tuple[float, float]:
    """Smallest and largest ratio of neighbouring windows: each pair ran one right after the other."""
    ratios = [
        statistics.median(other.seconds) / statistics.median(mine.seconds)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return min(ratios), max(ratios)


def read_rate(num_bytes: int) -> float:
    """Bytes per second of summing a tensor of this size, the best of seven."""
    data = torch.ones(num_bytes // 4)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def print_table(report: dict[str, Any]) -> None:
    """The report for people."""
    where = report["environment"]
    print(f"{where['machine']['processor']}, commit {where['commit']}, transformers {where['transformers']}")
    if report["speculation"]:
        speculation.print_table(report["speculation"])
    if not report["cells"]:
        return
    print(
        "model        batch  context  threads  tandem tok/s  transformers tok/s  ratio (range)  by CPU time  floor ms"
    )
    for cell in report["cells"]:
        low, high = cell["ratio_range"]
        print(
            f"{cell['model']:<12} {cell['batch']:>5} {cell['context']:>8} {cell['threads']:>8}"
            f" {cell['tandem']['tokens_per_second']:>13.1f} {cell['transformers']['tokens_per_second']:>19.1f}"
            f"   {cell['ratio']:>5.1f} ({low:.1f} to {high:.1f}) {cell['cpu_ratio']:>8.1f} {cell['floor_ms']:>7.2f} ms"
        )
