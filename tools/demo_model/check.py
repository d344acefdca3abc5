"""Reload a checkpoint with transformers, in fp32 on the CPU, and record what it says.

`python -m tools.demo_model.check --model DIR --out expected.json`

Each row holds prompt ids, the greedy ids, the text, what was expected, and `min_margin`: the smallest gap between the
first two logits on the way. An implementation in fp32 must give the same ids wherever that gap is well above its own
rounding.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from tandem.eval.retrieval_data import held_out_documents
from tools.demo_model.chat import ChatEncoder
from tools.demo_model.evaluate import answer_of
from tools.demo_model.export import transformers_state
from tools.demo_model.word_problems import HELD_OUT_SEED, HELD_OUT_SIZE, ProblemSource

RETRIEVAL_TOKENS = (2048, 2048, 4096, 4096)


@dataclass(frozen=True)
class Case:
    """A prompt, its sort and the answer it should get."""

    kind: str
    prompt: list[int]
    answer: str


def load_in_transformers(folder: Path) -> MiniMaxM3VLForCausalLM:
    """Build transformers' model from the checkpoint, fp32, eager attention; every tensor must find its place."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    config = MiniMaxM3VLTextConfig(**text, attn_implementation="eager")
    model = MiniMaxM3VLForCausalLM(config).float().eval()
    model.load_state_dict(transformers_state(folder, text["num_local_experts"]), strict=True)
    return model


@torch.no_grad()
def greedy(model: MiniMaxM3VLForCausalLM, prompt: list[int], end: int, limit: int = 400) -> tuple[list[int], float]:
    """Return the greedy continuation and the smallest gap between the first two logits on the way."""
    cache = DynamicCache(config=model.config)
    fed = torch.tensor([prompt])
    ids: list[int] = []
    margin = float("inf")
    while len(ids) < limit and (not ids or ids[-1] != end):
        logits: Tensor = model(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        fed = torch.tensor([[ids[-1]]])
    return ids, margin


def cases(chat: ChatEncoder, problems: int) -> list[Case]:
    """Return the first held-out problems and a few held-out documents."""
    source = ProblemSource(HELD_OUT_SEED, HELD_OUT_SIZE)
    chosen = [source[index] for index in range(problems)]
    found = [Case("word problem", chat.prompt(problem.question), problem.answer) for problem in chosen]
    for position, num_tokens in enumerate(RETRIEVAL_TOKENS):
        *_, document = held_out_documents(num_tokens, position + 1, chat.count)
        found.append(Case(f"retrieval {num_tokens}", chat.prompt(document.prompt()), document.asked[0].digits))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    chat = ChatEncoder(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    model = load_in_transformers(options.model)
    rows: list[dict[str, Any]] = []
    for case in cases(chat, options.problems):
        ids, margin = greedy(model, case.prompt, chat.end)
        row = {
            "kind": case.kind,
            "prompt": case.prompt,
            "greedy": ids,
            "text": chat.tokenizer.decode(ids, skip_special_tokens=False),
            "expected": case.answer,
            "min_margin": margin,
        }
        rows.append(row)
        print(f"{case.kind}: said {answer_of(chat, ids)!r}, expected {case.answer!r}, margin {margin:.3g}", flush=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
