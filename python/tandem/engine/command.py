"""`tandem generate`: text from the command line, once, for a file of prompts, or as a conversation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Imported where the command runs, so that --help need not load torch.
    from tandem.engine.chat import Message
    from tandem.engine.llm import LLM
    from tandem.engine.outputs import Delta, RequestOutput
    from tandem.engine.params import SamplingParams
    from tandem.engine.runner import StepTimes

_SAMPLING_OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate (default 512)"),
    "min_tokens": (int, "tokens before which nothing ends the text"),
    "temperature": (float, "0 is greedy (default 0)"),
    "top_k": (int, "keep the K most likely tokens; 0 keeps all"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "min_p": (float, "drop tokens less likely than this share of the most likely one"),
    "repetition_penalty": (float, "divides the logits of tokens that came before"),
    "presence_penalty": (float, "subtracted from the logits of generated tokens"),
    "frequency_penalty": (float, "subtracted once per occurrence"),
    "seed": (int, "same seed, same text"),
    "logprobs": (int, "log-probabilities of the N most likely tokens (with --json)"),
}
_DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.0}


class NoPromptError(ValueError):
    """There is nothing to generate from."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate`; it sets `run`: parsed arguments in, exit code out."""
    parser = subparsers.add_parser("generate", help="generate text", description=run.__doc__)
    parser.add_argument("--model", required=True, help="a model folder, or demo")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="the prompt")
    what.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line, run together; - is stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="use the model's chat form; without a prompt, hold a conversation, one line of stdin a turn",
    )
    parser.add_argument("--system", help="system turn of the chat form")
    parser.add_argument(
        "--thinking",
        choices=("enabled", "disabled", "adaptive"),
        default="enabled",
        help="how a reply in chat form is opened (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt, a line each")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING_OPTIONS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, default=_DEFAULTS.get(name), help=text)
    sampling.add_argument("--stop", action="append", default=[], help="string that ends the text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="the model's end tokens do not end the text")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def add_engine_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add what shapes an engine, which `engine_options` reads, and return the group."""
    engine = parser.add_argument_group("engine")
    add_drafter_option(engine)
    engine.add_argument("--draft-len", type=int, help="tokens proposed per step, 0 to 7 (default 3 with a drafter)")
    engine.add_argument(
        "--max-speculating-rows", type=int, metavar="N", help="propose nothing while more than N sequences decode"
    )
    engine.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default %(default)s")
    engine.add_argument("--kv-dtype", choices=("float32", "bfloat16"), help="by default that of --dtype")
    engine.add_argument("--kv-cache-bytes", type=int, help="size of the page pool")
    engine.add_argument("--max-model-len", type=int, help="most tokens of a sequence")
    engine.add_argument("--num-threads", type=int, help="kernel threads")
    engine.add_argument(
        "--no-overlap", dest="overlap", action="store_false", help="plan a step only when the one before has ended"
    )
    return engine


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`."""
    names = ("draft_len", "max_speculating_rows", "dtype", "kv_dtype", "kv_cache_bytes", "max_model_len")
    given = {name: getattr(arguments, name) for name in (*names, "num_threads", "overlap")}
    return given | {"drafter": drafter_of(arguments)}


def positive_int(text: str) -> int:
    """An option's value; an error of the command line unless it is an integer >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not allowed, it must be at least 1")
    return value


def add_drafter_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--drafter``, which `drafter_of` reads."""
    parser.add_argument(
        "--drafter",
        default="auto",
        metavar="auto|none|FOLDER",
        help="an Eagle3 drafter, whose proposals speed the text up (default %(default)s: the folder eagle3 inside the "
        "model's, if it has one)",
    )


def drafter_of(arguments: argparse.Namespace) -> str | None:
    """What ``--drafter`` asks for, as `LLM` takes it."""
    return None if arguments.drafter == "none" else str(arguments.drafter)


def run(arguments: argparse.Namespace) -> int:
    """Generate text. A single prompt streams; a line with tokens/s and where the time went follows."""
    prompts = _prompts(arguments)
    start = time.perf_counter()
    from tandem.engine.llm import LLM

    params = _params(arguments)
    with LLM(arguments.model, **engine_options(arguments)) as llm:
        load_seconds = time.perf_counter() - start
        if prompts is None:
            return _converse(llm, arguments, params)
        encoded = [_encode(llm, arguments, prompt) for prompt in prompts]
        start = time.perf_counter()
        if len(encoded) == 1 and not arguments.json:
            outputs = [_print_deltas(llm.stream(encoded[0], params))]
        else:
            outputs = llm.generate(encoded, params, progress=len(encoded) > 1 and sys.stderr.isatty())
        seconds = time.perf_counter() - start
        if arguments.json:
            for prompt, output in zip(prompts, outputs, strict=True):
                print(json.dumps(as_json(output, prompt), ensure_ascii=False))
        else:
            if len(outputs) > 1:
                for output in outputs:
                    print(output.text)
            stats = llm.stats()
            print(summary(outputs, load_seconds, seconds, stats.times))
            if stats.speculation.total.num_rounds > 0:
                print(f"[{stats.speculation.total}]")
    return 1 if any(output.finish_reason == "error" for output in outputs) else 0


def as_json(output: RequestOutput, prompt: str) -> dict[str, Any]:
    """The object that ``--json`` prints for one prompt."""
    fields: dict[str, Any] = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "tokens_per_second": output.tokens_per_second,
        "speculation": output.rounds.to_dict(),
        "seconds": asdict(output.timings),
    }
    if output.error is not None:
        fields["error"] = output.error
    if output.logprobs is not None:
        fields["logprobs"] = [asdict(entry) for entry in output.logprobs]
    return fields


def summary(outputs: Sequence[RequestOutput], load_seconds: float, seconds: float, times: StepTimes) -> str:
    """One line: tokens per second, and where the time went.

    For one output the rate is that of its decoding; for several, all generated tokens over the time of the whole run.
    """
    tokens = sum(output.completion_tokens for output in outputs)
    if len(outputs) == 1:
        first = outputs[0].timings.first_token or 0.0
        rate = outputs[0].tokens_per_second
        phases = f"load {load_seconds:.2f} s, prefill {first:.2f} s, decode {outputs[0].timings.total - first:.2f} s"
    else:
        rate = tokens / max(seconds, 1e-9)
        phases = f"load {load_seconds:.2f} s, run {seconds:.2f} s"
    # Launching and waiting hold the model's time once more.
    parts = {name: part for name, part in asdict(times).items() if name not in ("launch", "wait")}
    whole = max(sum(parts.values()), 1e-9)
    shares = ", ".join(f"{name} {100 * part / whole:.0f}%" for name, part in parts.items())
    return f"[{tokens} tokens, {rate:.1f} tokens/s; {phases}; steps: {shares}]"


def _prompts(arguments: argparse.Namespace) -> list[str] | None:
    """The prompts; None for a conversation."""
    if arguments.prompt is not None:
        return [arguments.prompt]
    if arguments.prompts_file is not None:
        text = sys.stdin.read() if str(arguments.prompts_file) == "-" else _read(arguments.prompts_file)
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise NoPromptError(f"{arguments.prompts_file} holds no prompt; one a line is expected")
        return lines
    if not arguments.chat:
        raise NoPromptError("nothing to generate from: give --prompt, --prompts-file or --chat")
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise NoPromptError(f"{path} is not UTF-8 text: {error}") from error


def _params(arguments: argparse.Namespace) -> SamplingParams:
    from tandem.engine.params import SamplingParams

    given = {name: getattr(arguments, name) for name in _SAMPLING_OPTIONS}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**chosen, stop=arguments.stop, ignore_eos=arguments.ignore_eos)


def _encode(llm: LLM, arguments: argparse.Namespace, prompt: str) -> str | list[int]:
    if not arguments.chat:
        return prompt
    return llm.encode_chat([*_system(arguments), _turn("user", prompt)], thinking_mode=arguments.thinking)


def _system(arguments: argparse.Namespace) -> list[Message]:
    return [] if arguments.system is None else [_turn("system", arguments.system)]


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _print_deltas(deltas: Iterable[Delta]) -> RequestOutput:
    """Print the text as it arrives; the finished output."""
    output = None
    for delta in deltas:
        print(delta.text, end="", flush=True)
        output = delta.output
    print()
    assert output is not None
    if output.error is not None:
        print(f"tandem: the request failed: {output.error}", file=sys.stderr)
    return output


def _converse(llm: LLM, arguments: argparse.Namespace, params: SamplingParams) -> int:
    """One line of stdin a turn, until its end."""
    from tandem.engine.tokenizer import THINK_OPEN

    messages = _system(arguments)
    opening = THINK_OPEN if arguments.thinking == "enabled" else ""
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append(_turn("user", line.rstrip("\n")))
        prompt = llm.encode_chat(messages, thinking_mode=arguments.thinking)
        if arguments.json:
            output = llm.generate(prompt, params)[0]
            print(json.dumps(as_json(output, messages[-1]["content"]), ensure_ascii=False), flush=True)
        else:
            output = _print_deltas(llm.stream(prompt, params))
        # The turn is kept as the model saw it, so that the next prompt finds its pages in the prefix cache.
        messages.append(_turn("assistant", opening + output.text))
