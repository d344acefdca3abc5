"""Checks what every text file should have: Unix line ends, a last newline, no trailing blanks, no merge marks."""

import re
import sys
from pathlib import Path

MAX_BYTES = 1 << 20
# The shipped checkpoint: large, and written by programs.
DATA_FOLDER = "python/tandem/demo/"

_MERGE_MARK = re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE)


def faults(path: Path, name: str) -> list[str]:
    """What is wrong with the bytes of `path`; `name` is its path inside the repository."""
    if name.startswith(DATA_FOLDER) and path.suffix != ".py":
        return []
    data = path.read_bytes()
    found = []
    if len(data) > MAX_BYTES:
        found.append(f"{name}: {len(data)} bytes, more than {MAX_BYTES}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return found
    if "\0" in text or not text:
        return found
    if "\r\n" in text:
        found.append(f"{name}: Windows line ends")
    if not text.endswith("\n"):
        found.append(f"{name}: no newline at the end")
    if _MERGE_MARK.search(text):
        found.append(f"{name}: a mark of an unfinished merge")
    for number, line in enumerate(text.splitlines(), start=1):
        if line != line.rstrip(" \t"):
            found.append(f"{name}:{number}: blanks at the end of the line")
    return found


def main(arguments: list[str]) -> int:
    """`hygiene.py FILE...`, names relative to the repository."""
    found = [fault for name in arguments for fault in faults(Path(name), name)]
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
