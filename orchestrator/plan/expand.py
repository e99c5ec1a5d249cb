"""Multiply the axes of a cell entry: one point per combination, `include` added, `exclude` taken away."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from moegate.records import ModelSpec
from orchestrator.cells import KINDS
from orchestrator.cells.base import CellSpec, Kind
from orchestrator.matrix import Matrix

__all__ = ["Point", "expand"]


@dataclass(frozen=True)
class Point:
    """One combination: the axes as they go into the cell's record, and where the entry stands in the matrix."""

    kind: Kind
    spec: CellSpec
    place: tuple[str | int, ...]
    axes: dict[str, Any]
    label: str


def expand(matrix: Matrix, models: dict[str, ModelSpec]) -> Iterator[Point]:
    """Yield the points of all entries, in the order of the file."""
    for index, spec in enumerate(matrix.spec.cells):
        kind = KINDS[spec.kind]
        place = ("cells", index)
        excluded = _excluded(matrix, kind, spec, place)
        for point in _points(kind, spec, place, models):
            if not any(_matches(point.axes, wanted) for wanted in excluded):
                yield point
        for number, extra in enumerate(spec.include):
            here = (*place, "include", number)
            yield from _points(kind, _merged(matrix, kind, spec, extra, here), here, models)


def _points(kind: Kind, spec: CellSpec, place: tuple[str | int, ...], models: dict[str, ModelSpec]) -> Iterator[Point]:
    choices: list[list[tuple[str, Any]]] = []
    for axis in kind.axes:
        value = getattr(spec, axis.key)
        if axis.multiplies:
            values = value or [None]
            choices.append([(axis.name, _json(item)) for item in values])
        else:
            choices.append([(axis.name, _json(value))])
    several_loads = len(getattr(spec, "load", ())) > 1
    for combination in itertools.product(*choices):
        axes = {name: value for name, value in combination if value is not None}
        model = models.get(axes.get("model", ""))
        if model is not None and kind.name != "check" and "dtype" not in axes:
            axes["dtype"] = model.dtype or "bfloat16"
        yield Point(kind, spec, place, axes, _label(kind, axes, several_loads))


def _json(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


def _label(kind: Kind, axes: dict[str, Any], several_loads: bool) -> str:
    words: list[str] = [kind.name]
    for axis in kind.axes:
        value = axes.get(axis.name)
        if value is None or not axis.multiplies:
            continue
        if axis.name == "load":
            if several_loads:
                pace = f"c{value['concurrency']}" if "concurrency" in value else f"r{value['rate']:g}"
                words.append(f"n{value['requests']}-{pace}-i{value['input']}-o{value['output']}")
            continue
        words.append(str(value))
    return "/".join(words)


def _merged(
    matrix: Matrix, kind: Kind, spec: CellSpec, extra: dict[str, Any], place: tuple[str | int, ...]
) -> CellSpec:
    """The entry with the keys of one `include` point in place of its own."""
    axes = {axis.key for axis in kind.axes}
    for key in extra:
        if key not in axes:
            matrix.fail((*place, key), f"is not an axis of {kind.name}", f"one of {', '.join(sorted(axes))}")
    values = {**spec.model_dump(exclude={"include", "exclude"}, exclude_none=True), **extra}
    try:
        return kind.spec.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        context = problem.get("ctx") or {}
        matrix.fail((*place, *problem["loc"]), str(problem["msg"]), str(context.get("fix", "see docs/matrix.md")))


def _excluded(
    matrix: Matrix, kind: Kind, spec: CellSpec, place: tuple[str | int, ...]
) -> list[dict[str, frozenset[str]]]:
    names = {axis.key: axis.name for axis in kind.axes if axis.multiplies and axis.name != "load"}
    out = []
    for number, point in enumerate(spec.exclude):
        wanted = {}
        for key, value in point.items():
            here = (*place, "exclude", number, key)
            if key not in names:
                matrix.fail(here, f"is not an axis of {kind.name}", f"one of {', '.join(names)}")
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(item, str) for item in values):
                matrix.fail(here, "must be a value or a list of values", f"write `{key}: value`")
            wanted[names[key]] = frozenset(str(item) for item in values)
        if wanted:
            out.append(wanted)
    return out


def _matches(axes: dict[str, Any], wanted: dict[str, frozenset[str]]) -> bool:
    return all(str(axes.get(name)) in values for name, values in wanted.items())
