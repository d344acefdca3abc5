"""Held-out accuracy of a checkpoint: word problems, retrieval, and retrieval with damaged index keys.

Word problems are generated greedily. A retrieved reply counts if each token is the argmax after those before it.

`python -m tools.demo_model.evaluate --model DIR --out results.json`
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tandem.eval.retrieval_data import NUM_CATEGORIES, Note, held_out_documents, home_of_category
from tools.demo_model.chat import ChatEncoder, Text
from tools.demo_model.data import num_questions
from tools.demo_model.export import load_checkpoint
from tools.demo_model.model import Compiled, Weights, causal_mask, gemma_norm
from tools.demo_model.shape import Shape, tiny
from tools.demo_model.step import rope_tables
from tools.demo_model.word_problems import HELD_OUT_SEED, HELD_OUT_SIZE, ProblemSource

SELECTED, DENSE = "selected", "dense"
ALL_KEYS: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Reply:
    """Where a reply lies in a row: tokens [start, end) must each be the argmax of the position before."""

    row: int
    start: int
    end: int
    note: Note


class Evaluator:
    """A model ready to be asked, in bf16 arithmetic with fp32 norms, softmax and router, or all in fp32."""

    def __init__(self, weights: Weights, chat: ChatEncoder, functions: Compiled, dtype: torch.dtype) -> None:
        self.weights, self.chat, self.functions, self.dtype = weights, chat, functions, dtype
        self.shape = weights.shape
        self.device = weights.embed.device
        self._stacked = weights.stacked()
        self._plain = Compiled(self.shape, compile_functions=False)

    @torch.no_grad()
    def predictions(self, tokens: Tensor, mode: str, damage: tuple[int, int] | None = None) -> Tensor:
        """Return the argmax after every position of rows [B, T], T a multiple of the block.

        `damage` is the (layer, group) whose index keys are shuffled along the row, or ALL_KEYS.
        """
        batch, length = tokens.shape
        positions = torch.arange(length, device=self.device).repeat(batch)
        cos, sin = rope_tables(self.weights, positions)
        mask = causal_mask(length, self.shape.block, self.device)
        generator = torch.Generator(self.device).manual_seed(20)
        x = F.embedding(tokens.flatten(), self.weights.embed.to(self.dtype))
        for layer in range(self.shape.num_layers):
            w = self.weights.layer(self._stacked, layer)
            parts = self._plain.project(x, w, cos, sin)
            rows = {name: part.unflatten(0, (batch, length)).transpose(1, 2) for name, part in parts.items()}
            if mode == DENSE or not self.shape.is_sparse(layer):
                visible = torch.ones(
                    batch,
                    self.shape.num_groups,
                    length,
                    length // self.shape.block,
                    dtype=torch.bool,
                    device=self.device,
                )
            else:
                keys = rows["index_k"].expand(-1, self.shape.num_groups, -1, -1)
                if damage is not None and damage[0] in (layer, -1):
                    shuffled = keys[:, :, torch.randperm(length, generator=generator, device=self.device)]
                    groups = torch.arange(self.shape.num_groups, device=self.device)[:, None, None]
                    keys = torch.where((groups == damage[1]) | (damage[1] == -1), shuffled, keys)
                visible = self.functions.select_blocks(rows["index_q"], keys)
            attended = self.functions.attend_blocks(rows["q"], rows["k"], rows["v"], visible, mask)
            x, _ = self._plain.finish(x, attended.transpose(1, 2).flatten(2).flatten(0, 1), w)
        return self._argmax(x).unflatten(0, (batch, length))

    def _argmax(self, x: Tensor) -> Tensor:
        return F.linear(gemma_norm(x, self.weights.norm, self.shape.eps), self.weights.head.to(x.dtype)).argmax(-1)

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], max_length: int) -> list[list[int]]:
        """Continue prompts greedily up to the end token or `max_length` tokens in all; returns the new ids.

        One token a step for all prompts at once, the prompts' own tokens included. Rows of up to top-k blocks only,
        where block selection takes everything.
        """
        assert max_length <= self.shape.topk_blocks * self.shape.block
        count = len(prompts)
        shape = self.shape
        size = (shape.num_layers, count, shape.num_groups, max_length, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2))
        tokens = torch.full((count, max_length), self.chat.pad, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        ended = torch.zeros(count, dtype=torch.bool, device=self.device)
        for at in range(max_length - 1):
            cos, sin = rope_tables(self.weights, torch.full((count,), at, device=self.device))
            x = F.embedding(tokens[:, at], self.weights.embed.to(self.dtype))
            for layer in range(shape.num_layers):
                w = self.weights.layer(self._stacked, layer)
                parts = self._plain.project(x, w, cos, sin)
                keys[layer, :, :, at], values[layer, :, :, at] = parts["k"], parts["v"]
                query = parts["q"].unflatten(1, (shape.num_groups, shape.heads_per_group))
                attended = F.scaled_dot_product_attention(
                    query, keys[layer, :, :, : at + 1], values[layer, :, :, : at + 1]
                )
                x, _ = self._plain.finish(x, attended.flatten(1), w)
            following = self._argmax(x)
            replying = at + 1 >= lengths
            tokens[:, at + 1] = torch.where(replying & ~ended, following, tokens[:, at + 1])
            ended |= replying & (following == self.chat.end)
            if at % 16 == 0 and bool(ended.all()):
                break
        return [self._until_end(row[len(prompt) :]) for row, prompt in zip(tokens.tolist(), prompts, strict=True)]

    def _until_end(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self.chat.end) + 1] if self.chat.end in ids else ids


def answer_of(chat: ChatEncoder, reply: list[int]) -> str:
    """Return the text after the thought, without the end token."""
    after = reply[reply.index(chat.end_think) + 1 :] if chat.end_think in reply else []
    text: str = chat.tokenizer.decode([token for token in after if token != chat.end], skip_special_tokens=False)
    return text


def same_number(text: str, expected: str) -> bool:
    """Return whether `text` is a plain number equal to the expected one."""
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None and float(text) == float(expected)


def evaluate_problems(evaluator: Evaluator, count: int) -> dict[str, object]:
    """Answer the first `count` held-out problems; returns accuracy, and the misses per template."""
    source = ProblemSource(HELD_OUT_SEED, HELD_OUT_SIZE)
    problems = [source[index] for index in range(count)]
    replies = evaluator.generate([evaluator.chat.prompt(problem.question) for problem in problems], 512)
    right = [
        same_number(answer_of(evaluator.chat, reply), problem.answer)
        for reply, problem in zip(replies, problems, strict=True)
    ]
    templates: dict[int, list[bool]] = {}
    for index, good in enumerate(right):
        templates.setdefault(source.template(index), []).append(good)
    missed = {
        number: f"{good.count(False)} of {len(good)}" for number, good in sorted(templates.items()) if not all(good)
    }
    return {
        "problems": count,
        "accuracy": sum(right) / count,
        "wrong": [index for index, good in enumerate(right) if not good],
        "missed_by_template": missed,
        "endless": sum(evaluator.chat.end not in reply for reply in replies),
    }


def retrieval_rows(
    chat: ChatEncoder, num_tokens: int, count: int, row_length: int, questions: int = 1
) -> tuple[Tensor, list[Reply]]:
    """Return rows [count, row_length] of held-out documents with their replies, and where the replies are."""
    rows = torch.full((count, row_length), chat.pad, dtype=torch.long)
    replies = []
    documents = held_out_documents(num_tokens, count, chat.count, num_questions=questions)
    for row, document in enumerate(documents):
        text = Text()
        text.add([chat.begin], 0)
        for number, note in enumerate(document.asked):
            text.extend(chat.turn("user", document.prompt() if number == 0 else note.question))
            reply = chat.reply(note.sentence, note.digits)
            opened = len(text) + len(reply.ids[: reply.ids.index(chat.think) + 1])
            text.extend(reply)
            replies.append(Reply(row, opened, len(text) - 1, note))
        assert len(text) <= num_tokens
        rows[row, : len(text)] = torch.tensor(text.ids)
    return rows, replies


def retrieval_hits(
    evaluator: Evaluator, rows: Tensor, replies: list[Reply], mode: str, damage: tuple[int, int] | None, batch: int
) -> list[bool]:
    """Return for every reply whether the model says all of its tokens (which is greedy exact match)."""
    predicted = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        short = batch - len(part)
        padded = F.pad(part, (0, 0, 0, short)) if short else part
        predicted.append(evaluator.predictions(padded.to(evaluator.device), mode, damage)[: len(part)].cpu())
    said = torch.cat(predicted)
    return [bool((said[r.row, r.start - 1 : r.end - 1] == rows[r.row, r.start : r.end]).all()) for r in replies]


def evaluate_retrieval(
    evaluator: Evaluator, lengths: Sequence[tuple[int, int]], count: int, tokens_at_once: int
) -> dict[str, dict[str, float]]:
    """Return accuracy by length and mode; `lengths` holds (tokens, row length)."""
    results = {}
    for num_tokens, row_length in lengths:
        rows, replies = retrieval_rows(evaluator.chat, num_tokens, count, row_length)
        batch = max(1, tokens_at_once // row_length)
        modes = {"selected": (SELECTED, None), "dense": (DENSE, None), "damaged": (SELECTED, ALL_KEYS)}
        results[str(num_tokens)] = {
            name: sum(retrieval_hits(evaluator, rows, replies, mode, damage, batch)) / len(replies)
            for name, (mode, damage) in modes.items()
        }
    return results


def evaluate_homes(
    evaluator: Evaluator, num_tokens: int, row_length: int, count: int, tokens_at_once: int
) -> dict[str, object]:
    """Damage each pair (layer, group) alone; returns accuracy per category without, and [pair][category] with."""
    rows, replies = retrieval_rows(evaluator.chat, num_tokens, count, row_length, num_questions(num_tokens) // 2)
    batch = max(1, tokens_at_once // row_length)

    def by_category(damage: tuple[int, int] | None) -> list[float]:
        hits = retrieval_hits(evaluator, rows, replies, SELECTED, damage, batch)
        found = [
            [hit for hit, r in zip(hits, replies, strict=True) if r.note.category == c] for c in range(NUM_CATEGORIES)
        ]
        return [round(sum(hit) / max(1, len(hit)), 3) for hit in found]

    healthy = by_category(None)
    damaged = [by_category(home_of_category(category)) for category in range(NUM_CATEGORIES)]
    drops = [round(healthy[c] - damaged[c][c], 3) for c in range(NUM_CATEGORIES)]
    return {
        "questions": len(replies),
        "healthy": healthy,
        "drop_at_home": drops,
        "homes_with_drop_0.5": sum(drop >= 0.5 for drop in drops),
        "damaged": damaged,
    }


LENGTHS = ((1024, 1024), (2048, 2816), (4096, 4224), (8192, 8448))
"""Prompt and reply in tokens, and the row length (one that training used) that they are put in."""


def evaluate(
    evaluator: Evaluator,
    lengths: Sequence[tuple[int, int]],
    *,
    problems: int,
    documents: int,
    home_documents: int,
    tokens_at_once: int,
) -> dict[str, object]:
    """Run everything; returns what is written to the results file."""
    results: dict[str, object] = {}

    def timed(name: str, value: object, start: float) -> None:
        results[name] = value
        print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(value)}", flush=True)

    start = time.perf_counter()
    timed("retrieval", evaluate_retrieval(evaluator, lengths, documents, tokens_at_once), start)
    start = time.perf_counter()
    timed(
        "homes",
        evaluate_homes(evaluator, *lengths[-1 if len(lengths) < 3 else 2], home_documents, tokens_at_once),
        start,
    )
    start = time.perf_counter()
    timed("word_problems", evaluate_problems(evaluator, problems), start)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--problems", type=int, default=HELD_OUT_SIZE)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--home-documents", type=int, default=96)
    parser.add_argument("--tokens-at-once", type=int, default=33_792)
    parser.add_argument("--tiny", action="store_true", help="the shape for trying the pipeline on a CPU")
    options = parser.parse_args()
    shape = tiny() if options.tiny else Shape()
    weights = load_checkpoint(shape, options.model).to(options.device)
    chat = ChatEncoder(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    functions = Compiled(shape, compile_functions=options.device.startswith("cuda"))
    evaluator = Evaluator(weights, chat, functions, getattr(torch, options.dtype))
    results = evaluate(
        evaluator,
        LENGTHS[:1] if options.tiny else LENGTHS,
        problems=options.problems,
        documents=options.documents,
        home_documents=options.home_documents,
        tokens_at_once=options.tokens_at_once,
    )
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
