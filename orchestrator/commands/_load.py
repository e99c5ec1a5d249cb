"""A matrix file to its plan, with estimates from earlier runs; what `plan` and `run` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moegate.records import Plan

__all__ = ["RUNS", "Settings", "load_plan"]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PLACE=VALUE", help="Another value than the file's: cells[2].load.requests=8."),
]

RUNS = Path("runs")


def load_plan(path: Path, only: Iterable[str] = (), settings: Sequence[str] = ()) -> tuple[Plan, Path]:
    """Return the plan of a matrix (with `--set` values) and the repository's root."""
    from orchestrator.matrix import load
    from orchestrator.plan import build, read_history

    matrix = load(path, settings)
    earlier = RUNS.glob(f"{matrix.spec.name}-*") if RUNS.is_dir() else ()
    return build(matrix, only=only, history=read_history(earlier)), matrix.root
