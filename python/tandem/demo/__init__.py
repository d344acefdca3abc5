"""The demo model: a small MiniMax-M3 checkpoint in the official format that ships inside the package.

The folder holds `config.json`, `model.safetensors`, the tokenizer and its chat template, as any model folder does.
What the model was trained on and how well it does is written down in `tools/demo_model/README.md`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class WordProblem:
    """One held-out word problem: `question` in plain text, `answer` as the model has to write it.

    `drawn` says that the very text of the question also came up while the training set was drawn, and was left out
    there. Such a text belongs to a template with few variants, whose other variants training may well have seen.
    """

    question: str
    answer: str
    drawn: bool


def path() -> Path:
    """Return the folder of the demo checkpoint."""
    return _HERE / "model"


def held_out_word_problems() -> list[WordProblem]:
    """Return the word problems that no training text contains, in a fixed order."""
    lines = (_HERE / "data" / "word_problems.jsonl").read_text(encoding="utf-8").splitlines()
    return [WordProblem(**json.loads(line)) for line in lines]
