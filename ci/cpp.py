"""Builds the C++ tests and benchmarks in a build tree, and runs the tests.

`build/release` is the tree that the install made, so the libraries are compiled once for both; `build/sanitized` is a
tree of its own, without the extension, since the interpreter is not built with AddressSanitizer.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Every test process says which rule was broken and stops there; a leak is a fault too.
SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def tool(name: str) -> str:
    """The build tool that lies beside this interpreter, so that a machine needs none of its own."""
    return str(Path(sys.executable).parent / name)


def run(command: list[str], extra_environment: dict[str, str] | None = None) -> None:
    """Runs one command at the root, its tools found beside the interpreter first; raises on a non-zero exit."""
    environment = os.environ | (extra_environment or {})
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    subprocess.run(command, cwd=ROOT, check=True, env=environment)


def build(tree: str, sanitize: bool) -> None:
    """Configures what the tree lacks and compiles everything in it with two jobs."""
    options = ["-DTANDEM_BUILD_TESTS=ON"]
    if sanitize:
        # Level 1 keeps the random tests quick; the checks of both sanitizers are the same at every level.
        options += ["-DTANDEM_SANITIZE=ON", "-DTANDEM_BUILD_BINDINGS=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
        options += ["-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1 -D_GLIBCXX_ASSERTIONS"]
    else:
        options += ["-DTANDEM_BUILD_BENCH=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    run([tool("cmake"), "-S", ".", "-B", tree, "-G", "Ninja", *options])
    run([tool("cmake"), "--build", tree, "--parallel", "2"])


def test(tree: str, sanitize: bool, soak: bool) -> None:
    """Runs ctest, the long tests (named `Soak`) apart from the others; an empty set of tests is a failure."""
    environment = dict(SANITIZER_ENVIRONMENT) if sanitize else {}
    selection = ["--tests-regex" if soak else "--exclude-regex", "Soak"]
    timeout_s = "3600" if soak else "300"
    arguments = ["--test-dir", tree, "--output-on-failure", "--no-tests=error", "--parallel", "2"]
    run([tool("ctest"), *arguments, "--timeout", timeout_s, *selection], environment)


def main() -> int:
    """Exit code of the first command that failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["build", "test"])
    parser.add_argument("tree")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--soak", action="store_true")
    arguments = parser.parse_args()
    try:
        build(arguments.tree, arguments.sanitize)
        if arguments.action == "test":
            test(arguments.tree, arguments.sanitize, arguments.soak)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
