"""From a matrix file to a checked specification: shape first (schema), then sense (references and combinations)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from moegate import canonical
from moegate.errors import UsageError
from moegate.records.plan import MOST_CELLS
from orchestrator.cells import KINDS
from orchestrator.cells.base import CellSpec
from orchestrator.matrix.schema import MatrixSpec, kind_keys
from orchestrator.matrix.tree import (
    Mapping_,
    Node,
    Scalar,
    Sequence_,
    Text,
    change,
    dotted,
    find,
    line_of,
    parse,
    plain,
)

__all__ = ["Matrix", "Text", "cell_count", "load"]


Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix whose shape is right, with the means to say where something in it is wrong.

    `root` is the folder that relative paths start from: the repository's, or the matrix file's own outside of one.
    """

    path: Path
    root: Path
    spec: MatrixSpec
    digest: str
    tree: Mapping_
    settings: tuple[str, ...] = ()

    def line(self, place: Sequence[str | int]) -> int:
        """The line of a key or list entry; the nearest line above where the place itself was not written."""
        return line_of(self.tree, place)

    def fail(self, place: Sequence[str | int], message: str, fix: str) -> NoReturn:
        """Raise a UsageError about this place of the file."""
        raise UsageError(message, file=self.path, line=self.line(place), field=dotted(place), fix=fix)


def load(path: Path, settings: Sequence[str] = ()) -> Matrix:
    """Read and check a matrix.

    Args:
        path: the file.
        settings: values in place of the file's, as `--set` takes them (`compare.confirm=6`).

    Raises:
        UsageError: with file, line, field and what would be right.
    """
    tree = parse(path)
    for setting in settings:
        tree = change(tree, path, setting)
    raw = plain(tree)
    _check_kinds(path, tree, raw)
    _inherit(raw)
    spec = _validate(path, tree, raw)
    matrix = Matrix(path, _root(path), spec, canonical.digest(_texts(tree)), tree, tuple(settings))
    count = sum(cell_count(cell) for cell in spec.cells)
    if count > MOST_CELLS:
        matrix.fail(("cells",), f"multiplies to {count} cells", f"at most {MOST_CELLS}; name fewer values per axis")
    return matrix


def cell_count(cell: CellSpec) -> int:
    """How many cells a list entry makes before `exclude`, without making them."""
    axes = [axis for axis in KINDS[cell.kind].axes if axis.multiplies]
    sizes = {axis.key: len(getattr(cell, axis.key) or (None,)) for axis in axes}
    count = math.prod(sizes.values())
    for point in cell.include:
        count += math.prod(size for key, size in sizes.items() if key not in point)
    return count


def _texts(node: Node) -> Any:
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Sequence_):
        return [_texts(item) for item in node.items]
    return {key: _texts(value) for key, value in node.items.items()}


def _root(path: Path) -> Path:
    folder = path.resolve().parent
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists() or (parent / "pyproject.toml").is_file():
            return parent
    return folder


def _check_kinds(path: Path, tree: Mapping_, raw: Any) -> None:
    """Every cell must say its kind before its other keys can be judged."""
    cells = raw.get("cells")
    if not isinstance(cells, list):
        return
    for index, cell in enumerate(cells):
        place: Place = ("cells", index)
        line = line_of(tree, place)
        if not isinstance(cell, dict):
            raise UsageError(
                "must be a mapping with a kind", file=path, line=line, field=dotted(place), fix="write `- kind: serve`"
            )
        kind = cell.get("kind")
        if not isinstance(kind, str) or str(kind) not in KINDS:
            what = "has no kind" if kind is None else f"{str(kind)[:80]!r} is not a kind of cell"
            raise UsageError(
                what, file=path, line=line_of(tree, (*place, "kind")), field=dotted((*place, "kind")),
                fix=f"one of {', '.join(KINDS)}{_near(str(kind), KINDS)}",
            )  # fmt: skip


def _inherit(raw: dict[str, Any]) -> None:
    """Give each cell the defaults that its kind takes and that it does not write itself."""
    defaults, cells = raw.get("defaults"), raw.get("cells")
    if not isinstance(defaults, dict) or not isinstance(cells, list):
        return
    for index, cell in enumerate(cells):
        keys = kind_keys(str(cell["kind"]))
        cells[index] = {**{key: value for key, value in defaults.items() if key in keys}, **cell}


def _validate(path: Path, tree: Mapping_, raw: Any) -> MatrixSpec:
    try:
        return MatrixSpec.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # The first in the file is the one to mend first, and defaults come before the cells that inherit them.
    located = [(line_of(tree, _place(tree, problem["loc"])), problem) for problem in problems]
    line, problem = min(located, key=lambda pair: pair[0])
    place = _place(tree, problem["loc"])
    message, fix = _say(problem, place)
    more = len(problems) - 1
    raise UsageError(
        message + (f"; {more} more after it" if more else ""),
        file=path,
        line=line,
        field=dotted(place) or None,
        fix=fix,
    )


def _place(tree: Mapping_, location: Iterable[str | int]) -> Place:
    """Drop from pydantic's location what is not in the file: union tags, `[key]` marks, indices of single values."""
    steps: list[str | int] = []
    node: Node | None = tree
    for step in location:
        if isinstance(node, Mapping_):
            if step in KINDS and step not in node.items and steps[:1] == ["cells"]:
                continue
            if step == "[key]" or (isinstance(step, int) and str(step) not in node.items):
                continue
            steps.append(str(step))
            node = node.items.get(str(step))
        elif isinstance(node, Sequence_) and isinstance(step, int):
            steps.append(step)
            node = node.items[step] if step < len(node.items) else None
        elif node is None and isinstance(step, str) and step != "[key]":
            steps.append(step)
    # A value that a cell inherited is wrong where it was written: in the defaults.
    if len(steps) >= 3 and steps[0] == "cells" and isinstance(steps[1], int):
        written = find(tree, steps[:3])
        default = find(tree, ("defaults", *steps[2:3]))
        if written is None and default is not None:
            return ("defaults", *steps[2:])
    return tuple(steps)


def _say(problem: Any, place: Place) -> tuple[str, str | None]:
    """Our words for a validation error: what is wrong, and what would be right."""
    kind, context = problem["type"], problem.get("ctx") or {}
    if kind == "moegate":
        return context["message"], context["fix"]
    if kind == "extra_forbidden":
        kinds = [step for step in problem["loc"][:3] if step in KINDS]
        return "unknown key", _known_keys(place, kinds or KINDS)
    if kind == "missing":
        where = " here or in `defaults`" if place[:1] == ("cells",) else ""
        return "is missing", f"write `{place[-1]}: ...`{where}"
    if kind in ("literal_error", "enum"):
        value = problem.get("input")
        shown = f"{str(value)[:80]!r}" if isinstance(value, str) else "a list or mapping"
        return f"is {shown}", f"one of {context.get('expected', '').replace(' or ', ', ')}"
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return "must be a mapping of keys", "write `key: value` lines below it, indented"
    if kind == "list_type":
        return "must be a list", "write `- ...` lines below it, or [a, b]"
    if kind == "too_short":
        return "is empty", "name at least one"
    message = str(problem.get("msg", kind))
    return message[0].lower() + message[1:], None


def _known_keys(place: Place, kinds: Iterable[str]) -> str | None:
    model: Any = MatrixSpec
    if place[:1] == ("cells",):
        known = sorted(set().union(*(kind_keys(kind) for kind in kinds))) if len(place) <= 3 else _load_keys(place)
    else:
        known = _keys_at(model, place[:-1])
    if not known:
        return "remove it"
    return f"known keys: {', '.join(known)}{_near(str(place[-1]), known)}"


def _load_keys(place: Place) -> list[str]:
    """The one axis that is a mapping of its own."""
    from orchestrator.cells.serve import Load

    return sorted(Load.model_fields) if "load" in place else []


def _keys_at(model: Any, place: Sequence[str | int]) -> list[str]:
    from pydantic import BaseModel

    for step in place:
        if isinstance(step, int):
            continue
        info = getattr(model, "model_fields", {}).get(step)
        if info is None:
            continue
        inner = [info.annotation, *getattr(info.annotation, "__args__", ())]
        nested = [a for arg in inner for a in (arg, *getattr(arg, "__args__", ()))]
        model = next((arg for arg in nested if isinstance(arg, type) and issubclass(arg, BaseModel)), None)
        if model is None:
            return []
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
