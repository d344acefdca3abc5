"""`tandem serve`: the command line of the server."""

from __future__ import annotations

import argparse
import importlib
import logging
from pathlib import Path

from tandem.engine.command import add_engine_options, engine_options, positive_int

_PACKAGES = ("msgspec", "pydantic", "starlette", "uvicorn", "uvloop", "httptools", "zmq")
_DEFAULT_PROMPT_SD = 0.03


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve`; it sets `run`: parsed arguments in, exit code out. Loads nothing heavy."""
    parser = subparsers.add_parser("serve", help="an OpenAI-compatible HTTP server", description=run.__doc__)
    parser.add_argument("--model", required=True, help="a model folder, or demo")
    parser.add_argument("--served-model-name", help="the name that requests give (default: that of the folder)")
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    http.add_argument(
        "--port", type=int, default=8000, help="port to listen on, 0 for a free one (default %(default)s)"
    )
    http.add_argument(
        "--api-key", action="append", type=_key, default=[], help="key that requests must bear; may be repeated"
    )
    http.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line, unseen in process lists")
    http.add_argument("--max-body-bytes", type=positive_int, default=8 * 2**20, help="default %(default)s")
    http.add_argument("--access-log", action="store_true", help="log each request")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--max-requests",
        type=positive_int,
        default=256,
        help="generations that may run or wait at once; more get 429 (default %(default)s)",
    )
    traffic.add_argument(
        "--request-timeout",
        type=_seconds,
        default=600.0,
        help="seconds until a request is aborted (default %(default)g)",
    )
    traffic.add_argument(
        "--send-timeout",
        type=_seconds,
        default=30.0,
        help="seconds that a client may take nothing of its answer (default %(default)g)",
    )
    traffic.add_argument(
        "--shutdown-grace",
        type=_seconds,
        default=30.0,
        help="seconds that requests may go on after SIGTERM (default %(default)g)",
    )
    traffic.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=30.0,
        help="seconds without progress after which /health turns 503 (default %(default)g)",
    )
    canary = parser.add_argument_group("canary")
    canary.add_argument(
        "--canary",
        type=_seconds,
        metavar="SECONDS",
        help="replay fixed prompts so long after their last run, and compare their answers (default: never)",
    )
    canary.add_argument(
        "--canary-prompts",
        type=Path,
        metavar="FILE",
        help="what is replayed, as `tandem canary` writes it (default: canary.jsonl of the model's folder, else texts "
        "for any model)",
    )
    canary.add_argument(
        "--canary-allowance",
        type=_count,
        default=0,
        metavar="N",
        help="accepted drafts by which two answers to a prompt may differ (default %(default)s)",
    )
    engine = add_engine_options(parser)
    engine.add_argument(
        "--acceptance-baseline",
        type=_baseline,
        metavar="RATE[,SD]",
        help="what the acceptance alarm expects: the rate that `tandem eval acceptance` prints, and its deviation "
        "between prompts (default 0.03); without it both are learned from prompts that begin with nothing cached",
    )
    engine.add_argument(
        "--damage", choices=("draft-kv",), help="debug: let the drafter read its cache wrongly; the alarm must notice"
    )
    engine.add_argument("--max-seats", type=int, help="most sequences that run at once")
    engine.add_argument("--max-tokens-per-step", type=int, help="most tokens of one step; longer prompts are cut")
    engine.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    engine.add_argument("--seed", type=int, help="makes requests without a seed repeatable, in order of arrival")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve a model over HTTP, until SIGTERM or SIGINT; what runs then is finished first."""
    require_packages()
    from tandem import demo
    from tandem.serve.options import EngineConfig, ServerOptions
    from tandem.serve.server import run_server

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    path = demo.path() if arguments.model == "demo" else Path(arguments.model)
    engine = EngineConfig(
        model=arguments.model,
        max_seats=arguments.max_seats,
        max_tokens_per_step=arguments.max_tokens_per_step,
        enable_prefix_cache=not arguments.no_prefix_cache,
        seed=arguments.seed,
        acceptance_baseline=arguments.acceptance_baseline,
        damage_drafts=arguments.damage is not None,
        **engine_options(arguments),
    )
    options = ServerOptions(
        engine=engine,
        model_path=path,
        served_model_name=arguments.served_model_name or ("demo" if arguments.model == "demo" else path.resolve().name),
        host=arguments.host,
        port=arguments.port,
        api_keys=[*arguments.api_key, *_keys_in(arguments.api_key_file)],
        max_requests=arguments.max_requests,
        max_body_bytes=arguments.max_body_bytes,
        request_timeout_s=arguments.request_timeout,
        send_timeout_s=arguments.send_timeout,
        shutdown_grace_s=arguments.shutdown_grace,
        stall_s=arguments.stall_timeout,
        access_log=arguments.access_log,
        canary_interval_s=arguments.canary,
        canary_prompts=arguments.canary_prompts,
        canary_allowance=arguments.canary_allowance,
    )
    return run_server(options)


def require_packages() -> None:
    """Raises `MissingPackagesError` where the extra is not installed."""
    from tandem.serve.errors import MissingPackagesError

    missing = []
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
    if missing:
        raise MissingPackagesError(
            f"serving needs packages that are not installed ({', '.join(missing)}): pip install 'tandem-serve[serve]'"
        )


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    from tandem.serve.errors import ServerSetupError

    keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not keys:
        raise ServerSetupError(f"{file} holds no key; one a line is expected")
    return keys


def _key(text: str) -> str:
    if not text or text != text.strip():
        raise argparse.ArgumentTypeError("a key may not be empty, nor begin or end with a blank")
    return text


def _baseline(text: str) -> tuple[float, float]:
    rate, comma, deviation = text.partition(",")
    return float(rate), float(deviation) if comma else _DEFAULT_PROMPT_SD


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is not allowed, it must be at least 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not allowed, it must be a positive number of seconds")
    return value
