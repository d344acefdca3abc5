"""Train the demo model from nothing: `python -m tools.demo_model.train --out DIR`.

Writes the checkpoint, the tokenizer and `log.jsonl` into DIR. The schedule counts in steps. Should the machine be
slower than planned, `--minutes` shortens the run, and its schedule then depends on the clock.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from tools.demo_model.chat import ChatEncoder, save_tokenizer, train_tokenizer
from tools.demo_model.data import BatchSize, BatchStream
from tools.demo_model.export import save_checkpoint
from tools.demo_model.model import Compiled, Weights
from tools.demo_model.optim import MATRICES, TARGET_RATES, Optimizer, balance_experts, lr_factor
from tools.demo_model.shape import Shape, tiny
from tools.demo_model.step import Phase, Stepper, StepResult

SEED = 11
LOG_EVERY = 20
SELECTION_FROM = 0.4
HIDE_UNTIL = 0.8

LENGTH_MIX: tuple[tuple[float, dict[int, float]], ...] = (
    (0.12, {1024: 1.0}),
    (0.25, {1024: 0.4, 1408: 0.3, 2816: 0.3}),
    (0.45, {1408: 0.3, 2816: 0.4, 4224: 0.3}),
    (0.70, {1024: 0.1, 2816: 0.2, 4224: 0.5, 8448: 0.2}),
    (1.00, {1024: 0.1, 2816: 0.1, 4224: 0.3, 8448: 0.5}),
)
"""Shares of document lengths up to each point of the run."""


def document_length(step: int, num_steps: int) -> int:
    """Return the length of the documents of a step."""
    progress = step / num_steps
    mix = next((mix for until, mix in LENGTH_MIX if progress < until), LENGTH_MIX[-1][1])
    return Random(f"length/{step}").choices(list(mix), list(mix.values()))[0]


def phase_at(progress: float) -> Phase:
    """Return what is on at a point of the run."""
    return Phase(selection=progress >= SELECTION_FROM, hide=progress < HIDE_UNTIL)


class Log:
    """Writes one line every `LOG_EVERY` steps to a file and to the screen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._hits = self._totals = torch.zeros(())
        self._start = time.perf_counter()

    def add(self, step: int, length: int, progress: float, result: StepResult) -> None:
        """Count a step, and write a line if it is its turn."""
        self._hits, self._totals = self._hits + result.lookup_hits, self._totals + result.lookup_totals
        if step % LOG_EVERY:
            return
        line: dict[str, object] = {
            "step": step,
            "seconds": round(time.perf_counter() - self._start, 1),
            "progress": round(progress, 4),
            "length": length,
        }
        line |= {name: round(float(value), 5) for name, value in result.losses.items()}
        line["lookup_hits"] = [round(share, 2) for share in (self._hits / self._totals.clamp(min=1)).tolist()]
        counts = result.expert_counts
        line["expert_load"] = [round(float(value), 3) for value in (counts / counts.sum(-1, keepdim=True)).amax(-1)]
        self._hits = self._totals = torch.zeros(())
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        print(json.dumps(line), flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def train(
    out: Path,
    shape: Shape,
    size: BatchSize,
    lengths: Callable[[int], int],
    *,
    steps: int,
    minutes: float,
    device: str,
    workers: int,
) -> None:
    """Run the whole training; writes into `out`, on the way too. `lengths` gives each step's document length."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(shape.vocab_size), out)
    stream = BatchStream(out / "tokenizer.json", size, shape.block, lengths, workers)
    problems, documents = stream.problems(), stream.documents()
    chat = ChatEncoder(Tokenizer.from_file(str(out / "tokenizer.json")))
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    target = torch.device(device)
    weights = Weights(shape, SEED).to(target)
    on_gpu = target.type == "cuda"
    functions = Compiled(shape, compile_functions=on_gpu)
    stepper = Stepper(weights, functions, size, target, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = Optimizer(weights, MATRICES, TARGET_RATES)
    log = Log(out / "log.jsonl")
    start = saved = time.perf_counter()
    step = 0
    while True:
        elapsed = time.perf_counter() - start
        progress = max(step / steps, elapsed / (60 * minutes))
        if progress >= 1.0:
            break
        batch = next(documents)
        result = stepper.run(next(problems), batch, phase_at(progress))
        factor = lr_factor(step, progress)
        optimizer.step(factor)
        balance_experts(weights, factor, result.expert_counts)
        log.add(step, batch.tokens.shape[1], progress, result)
        if elapsed - (saved - start) > 100:
            saved = time.perf_counter()
            save_checkpoint(weights, out, bos=chat.begin, eos=chat.end)
        step += 1
    save_checkpoint(weights, out, bos=chat.begin, eos=chat.end)
    log.close()
    stream.close()
    print(f"{step} steps, {step * size.total / 1e6:.0f} M tokens, {time.perf_counter() - start:.0f} s", flush=True)
    if on_gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="the shape for trying the pipeline on a CPU")
    options = parser.parse_args()
    if options.tiny:
        shape, lengths = tiny(), lambda step: 1024
        size = BatchSize(problem_rows=2, document_tokens=2048, sampled_queries=64)
    else:
        shape, lengths = Shape(), lambda step: document_length(step, options.steps)
        size = BatchSize()
    train(
        options.out,
        shape,
        size,
        lengths,
        steps=options.steps,
        minutes=options.minutes,
        device=options.device,
        workers=options.workers,
    )


if __name__ == "__main__":
    main()
