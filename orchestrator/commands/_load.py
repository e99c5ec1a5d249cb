"""A matrix file to its plan, with estimates from earlier runs; what `plan` and `run` share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moegate.records import Plan

__all__ = ["RUNS", "load_plan"]

RUNS = Path("runs")


def load_plan(path: Path, only: Iterable[str] = ()) -> tuple[Plan, Path]:
    """Return the plan of a matrix and the repository's root."""
    from orchestrator.matrix import load
    from orchestrator.plan import build, read_history

    matrix = load(path)
    earlier = RUNS.glob(f"{matrix.spec.name}-*") if RUNS.is_dir() else ()
    return build(matrix, only=only, history=read_history(earlier)), matrix.root
