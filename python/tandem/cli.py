"""The `tandem` program: parses, runs one command, and turns a caller's mistake into one line and exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.engine.command import add_drafter_option, drafter_of
from tandem.engine.command import add_parser as add_generate
from tandem.eval.command import add_parser as add_eval
from tandem.serve.canary_command import add_parser as add_canary
from tandem.serve.command import add_parser as add_serve
from tandem.serve.top import add_parser as add_top

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; ``argv`` without its name, those of the process if None. Returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser(given[0] if given else "").parse_args(given)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; what is buffered cannot be written any more.
        sys.stdout = None
        return 0
    except (ValueError, OSError) as error:
        if not is_mistake(error):
            raise
        print(f"tandem: {one_line(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    return code


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The command line; of ``bench``, whose options need torch to be told, only where it is the ``command``.

    Otherwise nothing heavy is loaded.
    """
    parser = argparse.ArgumentParser(prog="tandem", description="Serve and try MiniMax-M3 models.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_generate(subparsers)
    add_eval(subparsers)
    add_serve(subparsers)
    add_canary(subparsers)
    add_top(subparsers)
    if command == "bench":
        from tandem.bench.command import add_parser as add_bench

        add_bench(subparsers)
    else:
        subparsers.add_parser("bench", help="measure against other software")
    inspect = subparsers.add_parser("inspect", help="what a model is and what serving it takes")
    inspect.add_argument("model", help="a model folder, or demo")
    add_drafter_option(inspect)
    inspect.add_argument("--kv-dtype", default="bfloat16", help="type of cached keys and values (default %(default)s)")
    inspect.add_argument(
        "--shard", default=(1, 0), type=shard_of, metavar="SIZE,RANK", help="rank of a tensor-parallel group to show"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=run_inspect)
    return parser


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the architecture, the drafter, the cache layout and its sizes."""
    from tandem import demo
    from tandem.core import layout
    from tandem.models.inspect import inspect_model

    path = demo.path() if arguments.model == "demo" else Path(arguments.model)
    inspection = inspect_model(
        path, drafter=drafter_of(arguments), kv_dtype=arguments.kv_dtype, shard=layout.Shard(*arguments.shard)
    )
    print(json.dumps(inspection.to_dict()) if arguments.json else inspection.render())
    return 0


def shard_of(text: str) -> tuple[int, int]:
    """The size and the rank in ``"SIZE,RANK"``."""
    size, comma, rank = text.partition(",")
    if not (comma and size.isdecimal() and rank.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE,RANK, such as 4,0")
    return int(size), int(rank)


def is_mistake(error: ValueError | OSError) -> bool:
    """Whether an error is the caller's: a file that cannot be read, or one of the project's own typed errors.

    Other errors are faults of ours and keep their trace.
    """
    if isinstance(error, OSError):
        return error.filename is not None or isinstance(error, FileNotFoundError)
    return type(error).__module__.partition(".")[0] == "tandem"


def one_line(error: Exception) -> str:
    """The message on one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    sys.exit(main())
