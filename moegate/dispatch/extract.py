"""An engine's dispatch, read from its source without importing it.

A watched function becomes ordered rows: for every `return`, `raise`, watched assignment or watched call, the condition
under which it is reached and the target. Order carries the rest: of two rows that both apply, the first wins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moegate import canonical
from moegate.dispatch.engines.sglang import WATCHED as _SGLANG
from moegate.dispatch.engines.vllm import WATCHED as _VLLM
from moegate.dispatch.engines.watch import Watched
from moegate.errors import UsageError

WATCHES: dict[str, tuple[Watched, ...]] = {"sglang": _SGLANG, "vllm": _VLLM}

MAX_BYTES = 8 << 20
_SKIP = frozenset({".git", ".venv", "node_modules", "__pycache__", "build"})
_PLATFORM = re.compile(
    r"(?<![A-Za-z])_?is_(xpu|hip|rocm|npu\w*|cuda|cpu\w*|musa|hpu|blackwell\w*|sm\d+\w*|gfx\d+\w*|amd|intel)(?![A-Za-z])"
    r"|_use_aiter|current_platform|is_device_capability"
)


@dataclass(frozen=True)
class SourceRow:
    """One way out of a watched function. `condition` is what must hold (`always` where nothing must)."""

    function: str
    index: int
    condition: str
    target: str
    line: int


@dataclass(frozen=True)
class SourceFunction:
    """A watched function as found: its file relative to the tree, its first line, its rows."""

    watched: Watched
    file: str
    line: int
    rows: tuple[SourceRow, ...]

    @property
    def name(self) -> str:
        """Its qualified name."""
        return self.watched.name


@dataclass(frozen=True)
class Extraction:
    """Everything read from one tree. `missing` are watched functions that it does not have."""

    engine: str
    functions: tuple[SourceFunction, ...]
    missing: tuple[Watched, ...]


def extract(source: Path, engine: str | None = None) -> Extraction:
    """Read an engine's dispatch from its repository, wheel folder or package folder.

    Args:
        source: the tree. engine: `sglang` or `vllm`; None finds out which one it is.

    Raises:
        UsageError: no such folder, no watched file in it, or a watched file that is no Python.
    """
    if not source.is_dir():
        raise UsageError("is no folder", file=source, fix="name a checkout or an unpacked wheel of the engine")
    if engine is not None and engine not in WATCHES:
        fix = f"one of {', '.join(WATCHES)}"
        raise UsageError(f"no watch table for {engine!r:.40}", field="engine", fix=fix)
    files = _watched_files(source)
    names = [engine] if engine else list(WATCHES)
    counts = {name: sum(watched.file in files for watched in WATCHES[name]) for name in names}
    chosen = max(counts, key=lambda name: counts[name])
    if not counts[chosen]:
        words = f"holds no watched file of {' or '.join(names)}"
        raise UsageError(words, file=source, fix="name the root of the engine's tree")
    functions: list[SourceFunction] = []
    missing: list[Watched] = []
    trees: dict[Path, ast.Module] = {}
    for watched in WATCHES[chosen]:
        path = files.get(watched.file)
        found = None if path is None else _function(trees.setdefault(path, _parse(path)), watched.name)
        if path is None or found is None:
            missing.append(watched)
            continue
        shown = path.relative_to(source).as_posix()
        functions.append(SourceFunction(watched, shown, found.lineno, tuple(_rows(found, watched))))
    return Extraction(chosen, tuple(functions), tuple(missing))


def shadows(function: SourceFunction) -> Iterator[tuple[SourceRow, str]]:
    """Rows that an explicit request cannot get past: the platform alone decides before the request is looked at."""
    words = function.watched.request
    if not words:
        return
    for row in function.rows:
        if _mentions(row.condition, words) or _mentions(row.target, words):
            return
        if _PLATFORM.search(row.condition):
            yield row, f"{row.target} is chosen for the platform before the request is looked at: {row.condition}"


def _mentions(text: str, words: tuple[str, ...]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)


def _watched_files(source: Path) -> dict[str, Path]:
    """Watched file (its path's end) -> the file; where several end alike, the shortest path."""
    ends = sorted({watched.file for table in WATCHES.values() for watched in table})
    names = {end.rsplit("/", 1)[-1] for end in ends}
    found: dict[str, Path] = {}
    for path in _python_files(source, names):
        text = path.as_posix()
        for end in ends:
            if text.endswith("/" + end) and (end not in found or len(text) < len(found[end].as_posix())):
                found[end] = path
    return found


def _python_files(folder: Path, names: set[str], depth: int = 0) -> Iterator[Path]:
    if depth > 14:
        return
    try:
        items = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(error.strerror or str(error), file=folder) from None
    for item in items:
        if item.is_symlink():
            continue
        if item.is_dir():
            if item.name not in _SKIP and not item.name.startswith("."):
                yield from _python_files(item, names, depth + 1)
        elif item.name in names:
            yield item


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(canonical.read_file(path, MAX_BYTES).decode())
    except SyntaxError as error:
        raise UsageError(f"is no Python: {error.msg}", file=path, line=error.lineno) from None
    except (UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"cannot be parsed: {type(error).__name__}", file=path) from None


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    body: list[ast.stmt] = tree.body
    parts = name.split(".")
    for part in parts[:-1]:
        owner = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == part), None)
        if owner is None:
            return None
        body = owner.body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next((node for node in reversed(body) if isinstance(node, kinds) and node.name == parts[-1]), None)


def _rows(function: ast.FunctionDef | ast.AsyncFunctionDef, watched: Watched) -> Iterator[SourceRow]:
    found = _block(function.body, (), watched)
    for index, (conditions, target, line) in enumerate(found):
        yield SourceRow(watched.name, index, " and ".join(conditions) or "always", target, line)


_Found = tuple[tuple[str, ...], str, int]


def _block(body: list[ast.stmt], conditions: tuple[str, ...], watched: Watched) -> Iterator[_Found]:
    for statement in body:
        yield from _statement(statement, conditions, watched)


def _statement(node: ast.stmt, conditions: tuple[str, ...], watched: Watched) -> Iterator[_Found]:
    match node:
        case ast.If():
            yield from _block(node.body, (*conditions, _condition(node.test)), watched)
            yield from _block(node.orelse, conditions, watched)
        case ast.Return(value=value):
            yield from _expression(value, conditions, node.lineno)
        case ast.Raise(exc=error):
            call = error.func if isinstance(error, ast.Call) else error
            yield conditions, f"raise {_text(call)}", node.lineno
        case ast.Assign(targets=targets, value=value):
            names = {part for target in targets for part in _names(target)}
            if names & set(watched.assigns) or _watched_call(value, watched):
                yield from _expression(value, conditions, node.lineno)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            if set(_names(target)) & set(watched.assigns) or _watched_call(value, watched):
                yield from _expression(value, conditions, node.lineno)
        case ast.Expr(value=value) if _watched_call(value, watched):
            yield from _expression(value, conditions, node.lineno)
        case ast.With() | ast.AsyncWith():
            yield from _block(node.body, conditions, watched)
        case ast.For() | ast.AsyncFor():
            yield from _block(node.body, (*conditions, f"for {_text(node.target)} in {_text(node.iter)}"), watched)
        case ast.While():
            yield from _block(node.body, (*conditions, _condition(node.test)), watched)
        case ast.Try():
            yield from _block(node.body, conditions, watched)
            for handler in node.handlers:
                yield from _block(handler.body, (*conditions, f"except {_text(handler.type)}"), watched)
            yield from _block([*node.orelse, *node.finalbody], conditions, watched)
        case ast.Match():
            for case in node.cases:
                guard = f" if {_text(case.guard)}" if case.guard else ""
                test = f"{_text(node.subject)} is {_text(case.pattern)}{guard}"
                yield from _block(case.body, (*conditions, test), watched)
        case _:
            return


def _expression(value: ast.expr | None, conditions: tuple[str, ...], line: int) -> Iterator[_Found]:
    if isinstance(value, ast.IfExp):
        yield from _expression(value.body, (*conditions, _condition(value.test)), line)
        yield from _expression(value.orelse, conditions, line)
    else:
        yield conditions, _text(value), line


def _condition(test: ast.expr) -> str:
    text = _text(test)
    return f"({text})" if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else text


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _names(item)


def _watched_call(value: ast.expr, watched: Watched) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
    return name in watched.calls


def _text(node: ast.AST | None) -> str:
    if node is None:
        return "None"
    return re.sub(r"\s+", " ", ast.unparse(node))[:400]
