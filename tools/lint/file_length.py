"""Checks that no source file is longer than a reader can hold."""

from pathlib import Path

MAX_LINES = 600


def faults(path: Path) -> list[str]:
    """One line when `path` has more than MAX_LINES lines."""
    with path.open(encoding="utf-8") as file:
        lines = sum(1 for _ in file)
    return [f"{path}: {lines} lines, more than {MAX_LINES}; split it by concept"] if lines > MAX_LINES else []
