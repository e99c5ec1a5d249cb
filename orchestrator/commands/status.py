"""`orchestrator status`: where a run stands, running or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status", epilog="Example: orchestrator status runs/cpu-20270101-120000 --json")(status)


def status(
    rundir: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print the state of every cell, from the journal; a run in progress is not disturbed."""
    from collections import Counter

    from moegate import journal
    from moegate.locks import spoken
    from orchestrator.commands._output import emit_json, table
    from orchestrator.scheduler import RunDir, outcomes, read_cells

    found = RunDir(rundir)
    plan = found.read_plan()
    entries = journal.read(found.journal_file) if found.journal_file.is_file() else []
    cells = outcomes(plan, read_cells(entries))
    holder = found.holder() or ""
    counts = Counter(cell.state for cell in cells)
    if as_json:
        emit_json(
            {
                "name": plan.name,
                "running": bool(holder),
                "holder": holder,
                "counts": dict(sorted(counts.items())),
                "entries": len(entries),
                "cells": [
                    {
                        "id": cell.cell,
                        "label": planned.label,
                        "state": cell.state,
                        "reason": cell.reason,
                        "attempts": len(cell.attempts),
                    }
                    for cell, planned in zip(cells, plan.cells, strict=True)
                ],
            }
        )
        return
    print(
        table([(c.state, p.label, str(len(c.attempts)), c.reason) for c, p in zip(cells, plan.cells, strict=True)],
              ("state", "cell", "attempts", "reason"))
    )  # fmt: skip
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    print(f"held by {spoken(holder)}" if holder else "no orchestrator is running it")
