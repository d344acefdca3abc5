"""The files that the lints look at: what git tracks, and what it would track."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def project_files(patterns: Sequence[str] = (), root: Path = ROOT) -> list[Path]:
    """Paths under `root`, ignored ones left out, that match one of the git `patterns` (all when there are none)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]
