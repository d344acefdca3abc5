"""Where a measurement was made: machine, software, commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tandem.core import cpu


def describe() -> dict[str, Any]:
    """Everything needed to repeat a measurement, as JSON values."""
    return {
        "command": shlex.join(sys.argv),
        "commit": commit(),
        "machine": {
            "processor": processor(),
            "processors": len(os.sched_getaffinity(0)),
            "kernels": cpu.isa(),
            "load_average": os.getloadavg()[0],
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def version(package: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str | None:
    """The commit of the working tree that this package lies in, `+` added where files changed; None outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return described.stdout.strip() or None
