"""Checks that no handler swallows every error: a broad `except` must do something with what it caught."""

import ast
from pathlib import Path

_BROAD = {"Exception", "BaseException"}


def faults(path: Path) -> list[str]:
    """The handlers of `path` that catch everything and whose body does nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return [
        f"{path}:{node.lineno}: an except that swallows every error"
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and all(map(_does_nothing, node.body))
    ]


def _is_broad(caught: ast.expr | None) -> bool:
    return caught is None or (isinstance(caught, ast.Name) and caught.id in _BROAD)


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue)
