"""`python -m tools.lint`: the project's own checks over all its files."""

import sys

from tools.lint import assertions, file_length, hygiene, include_direction, swallowed, words
from tools.lint.sources import ROOT, project_files


def main() -> int:
    """Prints every fault; exit code 1 if there is one."""
    found: list[str] = []
    for path in project_files(["cpp/*.h", "cpp/*.cpp"]):
        found += include_direction.faults(path, ROOT / "cpp")
    for path in project_files(["*.py", "*.cpp", "*.h", "*.cu"]):
        found += file_length.faults(path)
    for path in project_files(["*.py", "*.pyi", "*.cpp", "*.h", "*.cu", "*.md", "*.toml", "*.txt", "*.sh", "Makefile"]):
        found += words.faults(path)
    for path in project_files(["*.py"]):
        found += swallowed.faults(path)
    for path in project_files(["tests/*.py"]):
        found += assertions.faults(path)
    for path in project_files():
        found += hygiene.faults(path, str(path.relative_to(ROOT)))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
