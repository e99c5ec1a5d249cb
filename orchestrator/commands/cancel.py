"""`orchestrator cancel`: ask the orchestrator of a run to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cancel", epilog="Example: orchestrator cancel runs/cpu-20270101-120000")(cancel)


def cancel(
    rundir: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run directory.")],
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for it to end.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Ask the orchestrator that holds a run directory to end its launches and stop; finished cells are kept."""
    import time

    from moegate.errors import InfraError
    from moegate.locks import spoken
    from moegate.paths import write_atomic
    from orchestrator.commands._output import emit_json
    from orchestrator.scheduler import RunDir

    found = RunDir(rundir)
    found.read_plan()
    deadline = time.monotonic() + wait
    asked = False
    while True:
        holder = found.holder()
        if holder is None:
            found.cancel_file.unlink(missing_ok=True)
            if as_json:
                emit_json({"run": str(rundir), "stopped": asked})
            else:
                print("stopped" if asked else "no orchestrator is running it")
            return
        if not asked:
            write_atomic(found.cancel_file, "")
            asked = True
        if time.monotonic() > deadline:
            raise InfraError(
                f"{rundir} is still held by {spoken(holder)} after {wait:g} s (fix: it was asked to stop and may be "
                "ending its launches; ask again with a longer --wait, or kill that process)"
            )
        time.sleep(0.2)
