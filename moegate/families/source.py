"""A family table read from its source text, without running it: another revision's rows, for comparison."""

from __future__ import annotations

import ast
from typing import Any

from moegate.errors import UsageError
from moegate.families.table import Family


def families_in(text: str, file: str) -> tuple[Family, ...]:
    """The rows of a `table.py`.

    Raises:
        UsageError: the text is no Python, has no FAMILIES, or a row is no literal.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"is no Python: {error}", file=file) from None
    constants: dict[str, Any] = {}
    rows: tuple[Family, ...] | None = None
    for node in tree.body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(target, ast.Name) or value is None:
            continue
        if target.id == "FAMILIES" and isinstance(value, ast.Tuple):
            rows = tuple(_row(item, constants, file) for item in value.elts)
        else:
            try:
                constants[target.id] = ast.literal_eval(value)
            except ValueError:
                continue
    if rows is None:
        raise UsageError("has no FAMILIES", file=file)
    return rows


def _row(node: ast.expr, constants: dict[str, Any], file: str) -> Family:
    if not isinstance(node, ast.Call):
        raise UsageError("a row is no Family(...)", file=file, line=node.lineno)
    try:
        positional = [_value(argument, constants) for argument in node.args]
        named = {word.arg: _value(word.value, constants) for word in node.keywords if word.arg}
        return Family(*positional, **named)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"a row cannot be read: {error}", file=file, line=node.lineno) from None


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    return constants[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
