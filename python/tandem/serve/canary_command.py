"""`tandem canary`: the answers of a sound engine, kept for the canary of servers."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tandem.engine.command import add_engine_options, engine_options


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `canary`; it sets `run`: parsed arguments in, exit code out. Loads nothing heavy."""
    parser = subparsers.add_parser("canary", help="keep a sound engine's answers", description=run.__doc__)
    parser.add_argument("--model", required=True, help="a model folder, or demo")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with name, max_tokens, and prompt, messages or token_ids (default: canary.jsonl of the "
        "model's folder, else texts for any model)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the canary's prompts and print them with the answers, for --canary-prompts or as MODEL/canary.jsonl.

    Nothing is printed, and the exit code is 1, where the prefix-hit route answers otherwise than the cold one.
    """
    from tandem.serve.command import require_packages

    require_packages()
    import msgspec

    from tandem.engine.build import model_folder
    from tandem.engine.llm import LLM
    from tandem.engine.params import SamplingParams
    from tandem.serve.canary import Canary, CanaryAnswer, CanaryPrompt
    from tandem.serve.canary_prompts import default_path, read_prompts, with_answers

    path = arguments.prompts or default_path(model_folder(arguments.model))
    with LLM(arguments.model, **engine_options(arguments)) as llm:
        prompts = read_prompts(path, llm.tokenizer, llm.chat_template)
        prompts.check(
            vocab_size=llm.config.vocab_size,
            tokens_per_page=llm.limits.tokens_per_page,
            max_model_len=llm.limits.max_model_len,
        )

        async def send(prompt: CanaryPrompt, salt: str) -> CanaryAnswer:
            params = SamplingParams(temperature=0, max_tokens=prompt.max_tokens, cache_salt=salt, detokenize=False)
            return CanaryAnswer.of_output(llm.generate([list(prompt.token_ids)], params)[0])

        canary = Canary(prompts.prompts, send)
        results = asyncio.run(canary.run())
    if any(result.faults or result.not_compared for result in results):
        return 1
    for line in with_answers(prompts.lines, canary.expected):
        print(msgspec.json.encode(line).decode())
    return 0
