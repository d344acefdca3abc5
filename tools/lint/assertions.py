"""Checks that each Python test can fail: it asserts, expects an error, or calls something that does.

A called function counts where its name says that it checks, or where it is defined in the same file and can itself
fail.
"""

import ast
import re
from collections.abc import Collection
from pathlib import Path

_CHECKING_CALL = re.compile(r"(^|_)(assert|check|expect|raises|fail|warns)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults(path: Path) -> list[str]:
    """The test functions of `path` that assert nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    failing: set[str] = set()
    # Each round finds the callers of those found before, until there are no more.
    while new := {f.name for f in functions if f.name not in failing and _can_fail(f, failing)}:
        failing |= new
    tests = (f for f in functions if f.name.startswith("test_"))
    return [f"{path}:{test.lineno}: {test.name} asserts nothing" for test in tests if not _can_fail(test, failing)]


def _can_fail(function: _Function, failing: Collection[str]) -> bool:
    called = (_called_name(node) for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or any(
        name in failing or _CHECKING_CALL.search(name) is not None for name in called
    )


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
