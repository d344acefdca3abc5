"""Checks for words that do not belong in what is committed: markers of unfinished work, paths of one machine."""

import re
from pathlib import Path

# Spelt in pieces, so that this file passes its own check.
_MARKERS = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")
_UNFINISHED = re.compile(rf"\b({'|'.join(_MARKERS)})\b")
_MACHINE_PATH = re.compile(r"(?<![\w.~/\-}$)])/(home|root|work|Users|mnt)/\w")


def faults(path: Path) -> list[str]:
    """The lines of `path` that hold such words; a file that is not UTF-8 text holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _UNFINISHED.search(line):
            found.append(f"{path}:{number}: {match[1]}: finish it, or leave it out")
        if _MACHINE_PATH.search(line):
            found.append(f"{path}:{number}: a path of one machine")
    return found
