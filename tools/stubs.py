"""Generates the type stubs of the extension, `python/tandem/core/_core/*.pyi`, from the `tandem` that Python imports.

`--check` compares instead of writing, and fails where a committed stub differs from what the extension says now.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

STUBS = Path(__file__).resolve().parent.parent / "python" / "tandem" / "core" / "_core"


def generate() -> dict[str, str]:
    """Stub text by file name, one per submodule, with blanks at line ends removed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-r", "-m", "tandem.core._core", "-O", folder]
        subprocess.run(command, check=True)
        return {path.name: _tidy(path.read_text()) for path in sorted(Path(folder, "_core").glob("*.pyi"))}


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def differences(committed: dict[str, str], fresh: dict[str, str]) -> list[str]:
    """The unified diff that would make `committed` fresh; empty when it is."""
    found: list[str] = []
    for name in sorted(committed.keys() | fresh.keys()):
        old, new = committed.get(name, "").splitlines(), fresh.get(name, "").splitlines()
        found += difflib.unified_diff(old, new, f"committed {name}", f"generated {name}", lineterm="")
    return found


def main() -> int:
    """Exit code 1 when checking and a stub is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    fresh = generate()
    committed = {path.name: path.read_text() for path in sorted(STUBS.glob("*.pyi"))}
    if arguments.check:
        found = differences(committed, fresh)
        if found:
            print("\n".join(found), "\nstubs are stale: run `make stubs` and commit them", file=sys.stderr)
        return 1 if found else 0
    STUBS.mkdir(parents=True, exist_ok=True)
    for name in committed.keys() - fresh.keys():
        (STUBS / name).unlink()
    for name, text in fresh.items():
        (STUBS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
