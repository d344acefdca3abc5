"""`tandem bench`: measurements that compare the engine with something else in one run."""

from __future__ import annotations

import argparse

from tandem.engine.command import positive_int

MODELS = ("demo", "random-40m")
COMPARISONS = ("transformers", "speculation")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` with its measurements; each sets `run`: parsed arguments in, exit code out. Loads nothing heavy."""
    measurements = subparsers.add_parser("bench", help="measure against other software").add_subparsers(
        dest="measurement", required=True, metavar="MEASUREMENT"
    )
    decode = measurements.add_parser(
        "decode", help="greedy decoding beside transformers, and with drafts", description=run_decode.__doc__
    )
    decode.add_argument(
        "--compare",
        nargs="+",
        choices=COMPARISONS,
        default=list(COMPARISONS),
        help="with transformers, or the demo model's drafter with none (default: both)",
    )
    decode.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    decode.add_argument(
        "--draft-lens", nargs="+", type=_draft_len, default=[3, 4, 5], help="drafts of a round (default 3 4 5)"
    )
    decode.add_argument("--batch", nargs="+", type=positive_int, default=[1, 8])
    decode.add_argument("--context", nargs="+", type=positive_int, default=[64, 4096])
    decode.add_argument("--threads", nargs="+", type=positive_int, default=[1, 2])
    decode.add_argument("--tokens", type=positive_int, default=24, help="decode steps per window (default %(default)s)")
    decode.add_argument("--rounds", type=positive_int, default=2, help="rounds of windows ABBA (default %(default)s)")
    decode.add_argument(
        "--kv-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of our cache beside transformers, whose own is float32 (default %(default)s)",
    )
    decode.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    decode.set_defaults(run=run_decode)


def run_decode(arguments: argparse.Namespace) -> int:
    """Greedy decoding beside transformers, and with a drafter beside none: same weights, same tokens, one run."""
    from tandem.bench import decode

    return decode.main(arguments)


def _draft_len(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 7:
        raise argparse.ArgumentTypeError(f"{value} is not allowed, it must be 1 to 7")
    return value
