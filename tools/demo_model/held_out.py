"""Write the held-out word problems that ship with the package: `python -m tools.demo_model.held_out --steps N`.

Says of each whether its text also came up among the problems that a run of N steps draws, where it was left out.
"""

import argparse
import json
from pathlib import Path

from tools.demo_model.data import PROBLEMS_PER_CHUNK, BatchSize
from tools.demo_model.word_problems import (
    HELD_OUT_SEED,
    HELD_OUT_SIZE,
    TRAIN_SEED,
    TRAIN_SIZE,
    ProblemSource,
)

ROWS_PER_CHUNK = 1660
"""Rows that a chunk packs into, to within a few."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("python/tandem/demo/data/word_problems.jsonl"))
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    chunks = options.steps * BatchSize().problem_rows // ROWS_PER_CHUNK + 1
    source = ProblemSource(HELD_OUT_SEED, HELD_OUT_SIZE)
    held_out = [source[index] for index in range(HELD_OUT_SIZE)]
    digests = {problem.digest() for problem in held_out}
    training = ProblemSource(TRAIN_SEED, TRAIN_SIZE)
    drawn = set()
    for index in range(chunks * PROBLEMS_PER_CHUNK):
        digest = training[index].digest()
        if digest in digests:
            drawn.add(digest)
    with options.out.open("w", encoding="utf-8") as file:
        for problem in held_out:
            row = {"question": problem.question, "answer": problem.answer, "drawn": problem.digest() in drawn}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    count = sum(problem.digest() in drawn for problem in held_out)
    print(f"{len(held_out)} problems, {count} of them drawn again among {chunks * PROBLEMS_PER_CHUNK}")


if __name__ == "__main__":
    main()
