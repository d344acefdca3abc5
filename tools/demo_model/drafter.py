"""Train the demo model's drafter: `python -m tools.demo_model.drafter --model DIR --out DIR/eagle3`.

Writes the checkpoint and `log.jsonl` into the folder. The target in DIR stays as it is. The schedule counts in steps;
should the machine be slower than planned, `--minutes` shortens the run, which then depends on the clock.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.chat import QUESTION, REPLY, ChatEncoder, Text
from tools.demo_model.data import BatchSize, BatchStream, DocumentBatch, ProblemRows, pack
from tools.demo_model.drafter_model import MATRICES, Drafter, DraftFunctions, DraftStep, DraftWeights
from tools.demo_model.evaluate import Evaluator
from tools.demo_model.export import load_checkpoint, save_drafter
from tools.demo_model.model import Compiled
from tools.demo_model.optim import Optimizer, Rates, lr_factor
from tools.demo_model.shape import Shape
from tools.demo_model.supervision import Texts, Unroll, unroll_texts
from tools.demo_model.teacher import Rows, Teacher, positions_of

SEED = 12
RATES = Rates(muon=0.01, adam=2e-3)
LOG_EVERY = 20
FIRST_CHUNK, FIRST_DOCUMENTS = 400, 6000
"""Where the data streams go on: the target was trained on what comes before."""
GENERATED_FROM = 0.8
"""From here on the word problems are the target's own greedy replies."""
GUIDE_SHARE = 0.2

LENGTH_MIX: tuple[tuple[float, dict[int, float]], ...] = (
    (0.10, {1024: 1.0}),
    (0.30, {1024: 0.4, 4224: 0.6}),
    (1.00, {1024: 0.2, 4224: 0.4, 8448: 0.4}),
)
"""Shares of document lengths up to each point of the run."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Batches, steps of an unroll, bases in a row of word problems, tokens of a document for each base in it, and replies
    that the target generates, `generated_at_once` of them in parallel.
    """

    size: BatchSize
    unroll_steps: int = 7
    bases_per_row: int = 256
    tokens_per_base: int = 8
    generated: int = 16_384
    generated_at_once: int = 4096


def document_length(step: int, num_steps: int) -> int:
    """Return the length of the documents of a step."""
    mix = next((mix for until, mix in LENGTH_MIX if step / num_steps < until), LENGTH_MIX[-1][1])
    return Random(f"draft length/{step}").choices(list(mix), list(mix.values()))[0]


def open_prompts(rows: ProblemRows) -> Iterator[list[int]]:
    """Yield each conversation of packed rows up to the token that opens its first reply."""
    for tokens, kinds, segments in zip(rows.tokens, rows.kinds, rows.segments, strict=True):
        for number in range(int(segments[segments != 255].max()) + 1):
            (places,) = np.nonzero(segments == number)
            (replies,) = np.nonzero(kinds[places] == REPLY)
            yield tokens[places[: replies[0] + 1]].tolist()


def generated_rows(evaluator: Evaluator, problems: Iterator[ProblemRows], plan: Plan) -> ProblemRows:
    """Let the target answer prompts of the stream greedily and pack its replies, but for those without an end."""
    texts = []
    prompts = (prompt for rows in problems for prompt in open_prompts(rows))
    for _ in range(0, plan.generated, plan.generated_at_once):
        batch = [next(prompts) for _ in range(plan.generated_at_once)]
        for prompt, reply in zip(batch, evaluator.generate(batch, plan.size.row_length), strict=True):
            if reply and reply[-1] == evaluator.chat.end:
                text = Text()
                text.add(prompt[:-1], QUESTION)
                text.add([prompt[-1], *reply], REPLY)
                texts.append(text)
    return pack(texts, evaluator.chat.pad, plan.size.row_length)


def drawn_rows(rows: ProblemRows, count: int) -> Iterator[ProblemRows]:
    """Yield `count` rows at a time in random order, over and over."""
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(len(rows.tokens))
        for start in range(0, len(order) - count + 1, count):
            chosen = order[start : start + count]
            yield ProblemRows(rows.tokens[chosen], rows.kinds[chosen], rows.segments[chosen])


class DraftTrainer:
    """Computes the losses of a step and their gradients."""

    def __init__(self, teacher: Teacher, drafter: Drafter, plan: Plan) -> None:
        self.teacher, self.drafter, self.plan = teacher, drafter, plan
        self.device = teacher.weights.embed.device
        self._generator = torch.Generator(self.device).manual_seed(SEED)

    def run(self, problems: ProblemRows, documents: DocumentBatch) -> dict[str, Tensor]:
        """Run forward and backward; returns losses and, of both sorts, how long drafts of three are accepted."""
        plan = self.plan
        texts = [
            Texts(Rows(self._long(problems.tokens), self._long(problems.segments)), self._long(problems.kinds)),
            Texts(Rows(self._long(documents.tokens)), self._long(documents.kinds), self._long(documents.sources)),
        ]
        rows = [part.rows for part in texts]
        aux, argmax = self.teacher.states(rows)
        sizes = [part.tokens.numel() for part in rows]
        unrolls = [
            unroll_texts(
                part,
                predicted.view_as(part.rows.tokens),
                bases_per_row=count,
                steps=plan.unroll_steps,
                generator=self._generator,
            )
            for part, predicted, count in zip(
                texts,
                argmax.split(sizes),
                (plan.bases_per_row, documents.tokens.shape[1] // plan.tokens_per_base),
                strict=True,
            )
        ]
        next_ids = torch.cat([part.tokens.flatten() for part in rows]).roll(-1)
        entries = self.drafter.entries(aux, next_ids, positions_of(rows))
        token_ids, labels, counted = (
            torch.cat([getattr(unroll, name) for unroll in unrolls], 1) for name in ("token_ids", "labels", "counted")
        )
        split = unrolls[0].token_ids.shape[1]
        keys = entries.k[sizes[0] :]
        losses = torch.zeros(2, device=self.device)
        guide = torch.zeros((), device=self.device)
        hits = []
        for step, drafted in enumerate(self.drafter.unroll(entries, [part.bases for part in unrolls], token_ids)):
            ce, hit = self.drafter.functions.token_losses(drafted.y, labels[step], self.drafter.head)
            weighted = ce * counted[step]
            losses = losses + torch.stack(
                [_mean(weighted[:split], counted[step, :split]), _mean(weighted[split:], counted[step, split:])]
            )
            guide = guide + self._guide(drafted, keys, unrolls[1], step, split)
            hits.append(hit)
        losses, guide = losses / plan.unroll_steps, guide / plan.unroll_steps
        (losses.sum() + GUIDE_SHARE * guide).backward()
        with torch.no_grad():
            accepted = torch.stack(hits[:3]).cumprod(0).sum(0)
            whole = counted[min(2, plan.unroll_steps - 1)]
            return {
                "problems": losses[0].detach(),
                "documents": losses[1].detach(),
                "guide": guide.detach(),
                "problem_length": 1 + _mean(accepted[:split] * whole[:split], whole[:split]),
                "document_length": 1 + _mean(accepted[split:] * whole[split:], whole[split:]),
                "counted": counted[0].float().mean(),
            }

    def _guide(self, drafted: DraftStep, keys: Tensor, unroll: Unroll, step: int, split: int) -> Tensor:
        """Return -log of the attention, mean over heads, that a digit to look up pays to the slot that holds it.

        `keys` are those of the documents' slots. One head in eight that finds it would do; telling all of them is what
        makes the first one find it soon.
        """
        shape = self.drafter.shape
        rows = torch.arange(unroll.bases.at.shape[0], device=self.device) * unroll.bases.length
        source = unroll.sources[step].view_as(unroll.bases.at)
        needed = keys.index_select(0, (rows[:, None] + source.clamp(min=0)).flatten())
        queries = drafted.q[split:].unflatten(1, (-1, shape.heads_per_group)).float()
        logits = (queries * needed[:, :, None].float()).sum(-1).flatten(1) * shape.head_dim**-0.5
        paid = torch.logsumexp(logits - drafted.lse[split:], -1) - np.log(shape.num_heads)
        looking = unroll.counted[step] & (source >= 0).flatten()
        return -_mean(paid * looking, looking)

    def _long(self, array: Any) -> Tensor:
        return torch.as_tensor(array.astype(np.int64)).to(self.device, non_blocking=True)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return values.sum() / counted.sum().clamp(min=1)


def train(
    model: Path,
    out: Path,
    shape: Shape,
    plan: Plan,
    lengths: Callable[[int], int],
    *,
    steps: int,
    minutes: float,
    device: str,
    workers: int,
) -> None:
    """Run the whole training; writes into `out`, on the way too. `lengths` gives each step's document length."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_file = model / "tokenizer.json"
    stream = BatchStream(
        tokenizer_file, plan.size, shape.block, lambda number: lengths(number - FIRST_DOCUMENTS), workers
    )
    problems, documents = stream.problems(FIRST_CHUNK), stream.documents(FIRST_DOCUMENTS)
    target = torch.device(device)
    on_gpu = target.type == "cuda"
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    target_weights = load_checkpoint(shape, model).to(target).requires_grad_(False)
    functions = Compiled(shape, compile_functions=on_gpu)
    weights = DraftWeights(shape, SEED)
    weights.start_from(target_weights)
    weights.to(target)
    drafter = Drafter(weights, target_weights, DraftFunctions(shape, compile_functions=on_gpu, kernels=on_gpu), dtype)
    trainer = DraftTrainer(Teacher(target_weights, functions, dtype), drafter, plan)
    optimizer = Optimizer(weights, MATRICES, RATES)
    chat = ChatEncoder(Tokenizer.from_file(str(tokenizer_file)))
    evaluator = Evaluator(target_weights, chat, functions, dtype)
    generated = False
    with (out / "log.jsonl").open("w", encoding="utf-8") as log:
        start = saved = time.perf_counter()
        step = 0
        while (progress := max(step / steps, (time.perf_counter() - start) / (60 * minutes))) < 1.0:
            if progress >= GENERATED_FROM and not generated:
                began = time.perf_counter()
                rows = generated_rows(evaluator, problems, plan)
                problems, generated = drawn_rows(rows, plan.size.problem_rows), True
                print(f"{len(rows.tokens)} rows generated in {time.perf_counter() - began:.1f} s", flush=True)
            values = trainer.run(next(problems), next(documents))
            optimizer.step(lr_factor(step, progress))
            if step % LOG_EVERY == 0:
                line = {"step": step, "seconds": round(time.perf_counter() - start, 1), "progress": round(progress, 4)}
                text = json.dumps(line | {name: round(float(value), 4) for name, value in values.items()})
                print(text, file=log, flush=True)
                print(text, flush=True)
            if time.perf_counter() - saved > 100:
                saved = time.perf_counter()
                save_drafter(weights, out)
            step += 1
    save_drafter(weights, out)
    stream.close()
    print(f"{step} steps, {step * plan.size.total / 1e6:.0f} M tokens, {time.perf_counter() - start:.0f} s", flush=True)
    if on_gpu:
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="small batches, for trying the pipeline on a CPU")
    options = parser.parse_args()
    if options.tiny:
        lengths, size = lambda step: 1024, BatchSize(problem_rows=2, document_tokens=1024, sampled_queries=64)
        plan = Plan(size, unroll_steps=4, bases_per_row=64, generated=8, generated_at_once=8)
    else:
        lengths, plan = lambda step: document_length(step, options.steps), Plan(BatchSize())
    train(
        options.model,
        options.out,
        Shape(),
        plan,
        lengths,
        steps=options.steps,
        minutes=options.minutes,
        device=options.device,
        workers=options.workers,
    )


if __name__ == "__main__":
    main()
