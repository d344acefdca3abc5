"""The main job in small: the demo model answers a word problem that it has never seen, streaming its text."""

import subprocess
import sys
from pathlib import Path

from tandem import demo


def main() -> int:
    """Prints the question and the known answer, then runs `tandem generate` on it; its exit code is ours."""
    problem = next(problem for problem in demo.held_out_word_problems() if not problem.drawn)
    print(f"question: {problem.question}\nknown answer: {problem.answer}\n", flush=True)
    program = str(Path(sys.executable).parent / "tandem")
    command = [program, "generate", "--model", "demo", "--chat", "--prompt", problem.question, "--max-tokens", "512"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
