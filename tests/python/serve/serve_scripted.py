"""A server over the scripted engine; the arguments are JSON: fields of `ServerOptions`, and arguments of the engine."""

import json
import logging
import sys
from pathlib import Path

from tandem.serve.options import EngineConfig, ServerOptions
from tandem.serve.server import run_server

if __name__ == "__main__":
    folder, options, engine_arguments = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if "canary_prompts" in options:
        options["canary_prompts"] = Path(options["canary_prompts"])
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    sys.exit(
        run_server(
            ServerOptions(
                engine=EngineConfig(model=str(folder)),
                model_path=folder,
                served_model_name="scripted",
                port=0,
                engine_command=(sys.executable, "-m", "tests.python.serve.scripted_engine", *engine_arguments),
                **options,
            )
        )
    )
