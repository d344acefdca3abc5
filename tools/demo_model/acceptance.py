"""How much of what the drafter proposes the target accepts, on held-out texts that the target itself has written.

Drafts are greedy, and a round's drafts up to the first wrong one are the text itself. So it is enough to unroll the
drafter from every slot of the finished text, fed with that text, and then to walk through the rounds.

`python -m tools.demo_model.acceptance --model DIR --drafter DIR/eagle3 --out results.json`
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem.eval.stats import bootstrap_share
from tools.demo_model.chat import ChatEncoder
from tools.demo_model.drafter_model import Bases, Drafter, DraftFunctions, Entries
from tools.demo_model.evaluate import Evaluator, retrieval_rows
from tools.demo_model.export import load_checkpoint, load_drafter
from tools.demo_model.model import Compiled
from tools.demo_model.shape import Shape
from tools.demo_model.teacher import Rows, Teacher, positions_of
from tools.demo_model.word_problems import HELD_OUT_SEED, HELD_OUT_SIZE, ProblemSource

MAX_DRAFTS = 7
PAGE_TOKENS = 128
REPLY_TOKENS = 128
"""Reply of a document at most."""


@dataclass(frozen=True)
class Reply:
    """One finished text: token ids, of which the first `prompt` are the prompt's."""

    ids: list[int]
    prompt: int


@dataclass(frozen=True)
class Rounds:
    """What became of one text's drafts: for each round, how many were accepted."""

    accepted: list[int]


def walk(runs: Sequence[int], prompt: int, length: int) -> Rounds:
    """Go through the rounds of a text of `length` tokens; `runs` [length] is how many drafts are right at each slot.

    The first token after the prompt comes from the target, and so does one after each round's accepted drafts. No round
    follows once the last token is known. Drafts beyond it are wrong.
    """
    accepted = []
    newest = prompt
    while newest < length - 1:
        accepted.append(runs[newest - 1])
        newest += runs[newest - 1] + 1
    return Rounds(accepted)


def summary(texts: Sequence[Rounds], drafts: int) -> dict[str, object]:
    """Return mean length and rate with their 95 % intervals by text, and the rate at each draft position."""
    per_text = [[place < accepted for accepted in text.accepted for place in range(drafts)] for text in texts]
    outcomes = [outcome for text in per_text for outcome in text]
    rate, interval = sum(outcomes) / len(outcomes), bootstrap_share([text for text in per_text if text])
    rounds = len(outcomes) // drafts
    return {
        "texts": len(texts),
        "rounds": rounds,
        "length": round(1 + drafts * rate, 4),
        "length_interval": [round(1 + drafts * bound, 4) for bound in (interval.low, interval.high)],
        "rate": round(rate, 4),
        "per_position": [round(sum(outcomes[place::drafts]) / rounds, 4) for place in range(drafts)],
    }


def mix_heads(entry: Tensor, prompts: Tensor) -> Tensor:
    """Read pages that were written as four head-major groups of 32 tokens as if each were one plain page.

    `entry` [R, C, G, D] are keys or values by slot, stored one index further on; only those up to index `prompts` [R]
    change, the ones that a prompt's hand-over would bring. What nothing was written to reads as zero.
    """
    rows, length, groups, _ = entry.shape
    part = PAGE_TOKENS // groups
    index = torch.arange(length, device=entry.device) + 1
    head = torch.arange(groups, device=entry.device)[:, None]
    page, token = index // PAGE_TOKENS, index % PAGE_TOKENS
    source_head = (token // part).expand(groups, -1)
    source = page * PAGE_TOKENS + head * part + token % part
    row = torch.arange(rows, device=entry.device)[:, None, None]
    written = (source >= 1) & (source <= prompts[:, None, None])
    moved = entry[row, (source - 1).clamp(0, length - 1), source_head] * written[..., None]
    touched = (index <= prompts[:, None])[..., None, None]
    return torch.where(touched, moved.transpose(1, 2), entry)


class AcceptanceProbe:
    """A target and its drafter, ready to be measured."""

    def __init__(self, evaluator: Evaluator, teacher: Teacher, drafter: Drafter, rows_tokens: int) -> None:
        self.evaluator, self.teacher, self.drafter, self.rows_tokens = evaluator, teacher, drafter, rows_tokens
        self.chat = evaluator.chat
        self.device = evaluator.device

    @torch.no_grad()
    def runs(self, replies: Sequence[Reply], row_length: int, *, packed: bool, damaged: bool = False) -> Tensor:
        """Return how many of the first 1, 2, ... drafts of each slot are right, int64 [drafts, texts, row_length]."""
        found = []
        at_once = max(1, self.rows_tokens // row_length)
        for start in range(0, len(replies), at_once):
            part = list(replies[start : start + at_once])
            padded = part + [part[0]] * (at_once - len(part))
            found.append(self._runs(padded, row_length, packed, damaged)[:, : len(part)].cpu())
        return torch.cat(found, 1)

    def _runs(self, replies: list[Reply], row_length: int, packed: bool, damaged: bool) -> Tensor:
        tokens = torch.full((len(replies), row_length + MAX_DRAFTS + 1), -1)
        for row, reply in enumerate(replies):
            tokens[row, : len(reply.ids)] = torch.tensor(reply.ids)
        tokens = tokens.to(self.device)
        fed = tokens.clamp(min=self.chat.pad)
        rows = Rows(fed[:, :row_length].contiguous())
        if packed:
            rows = Rows(rows.tokens, torch.zeros_like(rows.tokens))
        aux, _ = self.teacher.states([rows])
        entries = self.drafter.entries(aux, fed[:, 1 : row_length + 1].flatten(), positions_of([rows]))
        prompts = torch.tensor([reply.prompt for reply in replies], device=self.device)
        if damaged:
            by_row = (entry.unflatten(0, (-1, row_length)) for entry in (entries.k, entries.v))
            entries = Entries(entries.hidden, *(mix_heads(entry, prompts).flatten(0, 1) for entry in by_row))
        # Every slot of a packed row, or those of a document's reply.
        count = row_length if packed else REPLY_TOKENS
        from_slot = torch.zeros_like(prompts) if packed else prompts - 1
        at = (from_slot[:, None] + torch.arange(count, device=self.device)).clamp(max=row_length - 1)
        bases = Bases(row_length, at, torch.zeros_like(at))
        ahead = [at + step for step in range(1, MAX_DRAFTS + 2)]
        token_ids = torch.stack([fed.gather(1, column).flatten() for column in ahead[:-1]])
        right = []
        for step, drafted in enumerate(self.drafter.unroll(entries, [bases], token_ids)):
            said = torch.nn.functional.linear(drafted.y.float(), self.drafter.head).argmax(-1).view_as(at)
            right.append(said == tokens.gather(1, ahead[step + 1]))
        length_of_run = torch.stack(right).long().cumprod(0).cumsum(0)
        spread = torch.zeros(MAX_DRAFTS, len(tokens), row_length, dtype=torch.long, device=self.device)
        return spread.scatter_(2, at.expand_as(length_of_run), length_of_run)

    def measure(
        self, replies: Sequence[Reply], row_length: int, *, packed: bool, damaged: bool = False, drafts: Sequence[int]
    ) -> dict[str, object]:
        """Return the summary of each number of drafts."""
        runs = self.runs(replies, row_length, packed=packed, damaged=damaged)
        return {
            str(count): summary(
                [
                    walk(row, reply.prompt, len(reply.ids))
                    for row, reply in zip(runs[count - 1].tolist(), replies, strict=True)
                ],
                count,
            )
            for count in drafts
        }

    def problem_replies(self, count: int) -> list[Reply]:
        """Return the target's greedy replies to the first held-out word problems."""
        source = ProblemSource(HELD_OUT_SEED, HELD_OUT_SIZE)
        prompts = [self.chat.prompt(source[index].question) for index in range(count)]
        replies = self.evaluator.generate(prompts, 512)
        return [Reply(prompt + reply, len(prompt)) for prompt, reply in zip(prompts, replies, strict=True)]

    def document_replies(self, num_tokens: int, row_length: int, count: int) -> list[Reply]:
        """Return the target's greedy replies about held-out documents, one question each."""
        rows, expected = retrieval_rows(self.chat, num_tokens, count, row_length)
        at_once = max(1, self.rows_tokens // row_length)
        replies = []
        for start in range(0, count, at_once):
            part = rows[start : start + at_once]
            known = torch.cat([part, part[:1].expand(at_once - len(part), -1)]).to(self.device)
            prompts = [reply.start for reply in expected[start : start + at_once]]
            replies.extend(self._continue(known, prompts))
        return replies

    def _continue(self, known: Tensor, prompts: list[int]) -> list[Reply]:
        """Return what the target says after each prompt; `known` [B, T] holds a guess at it, which only saves time."""
        rows = known.tolist()
        while True:
            _, argmax = self.teacher.states([Rows(torch.tensor(rows, device=self.device))])
            predicted = argmax.view_as(known).tolist()
            replies = [
                self._settle(row, said, prompt) for row, said, prompt in zip(rows, predicted, prompts, strict=False)
            ]
            finished = [reply for reply in replies if reply is not None]
            if len(finished) == len(prompts):
                return finished

    def _settle(self, row: list[int], said: list[int], prompt: int) -> Reply | None:
        """Correct the first token of a reply that the target would not say; return the reply once there is none."""
        limit = min(prompt + REPLY_TOKENS - MAX_DRAFTS, len(row))
        for at in range(prompt, limit):
            if row[at] != said[at - 1]:
                row[at] = said[at - 1]
                row[at + 1 : limit] = [self.chat.pad] * (limit - at - 1)
                return None
            if row[at] == self.chat.end:
                return Reply(row[: at + 1], prompt)
        return Reply(row[:limit], prompt)


LENGTHS = ((1024, 1024), (4096, 4224), (8192, 8448))
"""Prompt and reply in tokens, and the row length (one that training used) that they are put in."""


def evaluate(
    probe: AcceptanceProbe, lengths: Sequence[tuple[int, int]], *, problems: int, documents: int
) -> dict[str, object]:
    """Run everything; returns what is written to the results file."""
    results: dict[str, object] = {}

    def timed(name: str, value: object, start: float) -> None:
        results[name] = value
        print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(value)}", flush=True)

    start = time.perf_counter()
    replies = probe.problem_replies(problems)
    all_drafts = range(1, MAX_DRAFTS + 1)
    timed("word_problems", probe.measure(replies, 512, packed=True, drafts=all_drafts), start)
    start = time.perf_counter()
    timed("word_problems_heads_mixed", probe.measure(replies, 512, packed=True, damaged=True, drafts=[3]), start)
    for num_tokens, row_length in lengths:
        start = time.perf_counter()
        replies = probe.document_replies(num_tokens, row_length, documents)
        timed(f"retrieval_{num_tokens}", probe.measure(replies, row_length, packed=False, drafts=all_drafts), start)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--tokens-at-once", type=int, default=33_792)
    parser.add_argument("--longest", type=int, default=8192, help="leave out documents longer than this")
    options = parser.parse_args()
    shape = Shape()
    on_gpu = options.device.startswith("cuda")
    dtype = getattr(torch, options.dtype)
    weights = load_checkpoint(shape, options.model).to(options.device)
    functions = Compiled(shape, compile_functions=on_gpu)
    draft_functions = DraftFunctions(shape, compile_functions=False, kernels=on_gpu)
    drafter = Drafter(load_drafter(shape, options.drafter).to(options.device), weights, draft_functions, dtype)
    chat = ChatEncoder(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    probe = AcceptanceProbe(
        Evaluator(weights, chat, functions, dtype),
        Teacher(weights, functions, dtype),
        drafter,
        options.tokens_at_once,
    )
    lengths = [pair for pair in LENGTHS if pair[0] <= options.longest]
    results = evaluate(probe, lengths, problems=options.problems, documents=options.documents)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
