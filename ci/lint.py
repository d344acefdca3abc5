"""Format and lint of everything, and the direction of imports; all checks run even after one failed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.lint.sources import project_files  # noqa: E402  (the path above makes it importable)


def main() -> int:
    """Exit code 1 if any check found something."""
    binaries = Path(sys.executable).parent
    cpp = [str(path) for path in project_files(["*.h", "*.cpp", "*.cu"])]
    checks = [
        [binaries / "ruff", "format", "--check", "."],
        [binaries / "ruff", "check", "."],
        [binaries / "clang-format", "--dry-run", "--Werror", *cpp],
        [binaries / "codespell"],
        [sys.executable, "-m", "tools.lint"],
        [binaries / "lint-imports", "--no-cache"],
    ]
    # import-linter reads the sources of the tree, not the installed copy.
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    codes = [subprocess.run(check, cwd=ROOT, check=False, env=environment).returncode for check in checks]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
