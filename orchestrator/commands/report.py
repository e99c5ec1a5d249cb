"""`orchestrator report`: judge a run again and write its reports again, from the records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands._output import Github

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", epilog="Example: orchestrator report runs/cpu-20270101-120000")(report)


def report(
    rundir: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the gate's result as JSON.")] = False,
    github: Github = False,
) -> None:
    """Write report.html, junit.xml, results.sarif and summary.md of a run, finished or not.

    The history gets a run when it is finished.
    """
    from moegate.records import to_json
    from orchestrator.commands._conclude import conclude
    from orchestrator.commands._output import emit_json

    verdict = conclude(rundir.resolve(), github=github)
    if as_json:
        emit_json({**to_json(verdict), "report": str(rundir / "report.html")})
        return
    print(verdict.sentence)
    print(f"report: {rundir / 'report.html'}")
