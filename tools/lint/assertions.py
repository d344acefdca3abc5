"""Checks that each Python test can fail: it asserts, expects an error, or calls a helper that says it checks."""

import ast
import re
from pathlib import Path

_CHECKING_CALL = re.compile(r"(^|_)(assert|check|expect|raises|fail|warns)")


def faults(path: Path) -> list[str]:
    """The test functions of `path` that assert nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return [
        f"{path}:{node.lineno}: {node.name} asserts nothing"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not any(_can_fail(part) for part in ast.walk(node))
    ]


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            return _CHECKING_CALL.search(node.func.attr) is not None
        if isinstance(node.func, ast.Name):
            return _CHECKING_CALL.search(node.func.id) is not None
    return False
