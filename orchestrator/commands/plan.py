"""`orchestrator plan`: what a run would do, and why each cell is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands._load import Settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", epilog="Example: orchestrator plan matrix.yaml --json")(plan)


def plan(
    matrix: Annotated[Path, typer.Argument(metavar="MATRIX", help="The matrix file.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only matching cells, and what they need.")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan record.")] = False,
) -> None:
    """Print the cells of a matrix with their ids, pools, reasons and estimates. Nothing is run."""
    from moegate.records import to_json
    from orchestrator.commands._load import load_plan
    from orchestrator.commands._output import emit_json, say, table
    from orchestrator.scheduler.progress import duration

    planned, _ = load_plan(matrix, only or (), settings or ())
    if as_json:
        emit_json(to_json(planned))
        return
    rows: list[tuple[str, ...]] = [
        (cell.id, cell.pool or "host", duration(cell.estimate_s or 0.0), cell.label, cell.why) for cell in planned.cells
    ]
    print(table(rows, ("id", "pool", "about", "cell", "why")))
    total = sum(cell.estimate_s or 0.0 for cell in planned.cells)
    print(f"{len(planned.cells)} cells, about {duration(total)} one after the other")
    for warning in planned.warnings:
        say(f"note: {warning}")
