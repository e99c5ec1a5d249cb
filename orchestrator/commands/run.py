"""`orchestrator run`: from a matrix to a gated report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands._load import Settings
from orchestrator.commands._output import Github

if TYPE_CHECKING:
    from moegate.records import Plan

__all__ = ["register"]

_EPILOG = "Example: orchestrator run matrix.yaml --only 'serve/*' --out runs/try"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", epilog=_EPILOG)(run)


def run(
    matrix: Annotated[Path, typer.Argument(metavar="MATRIX", help="The matrix file.")],
    out: Annotated[Path | None, typer.Option(help="The run directory (default runs/NAME-TIME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, or the newest run.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only matching cells, and what they need.")
    ] = None,
    isolation: Annotated[str | None, typer.Option(metavar="auto|docker|process", help="Overrides the pools.")] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gate's result as JSON.")] = False,
    github: Github = False,
) -> None:
    """Plan a matrix, run its cells, compare the arms, gate, and write the reports."""
    from moegate.errors import UsageError
    from moegate.exits import Exit
    from orchestrator.commands._load import RUNS, load_plan
    from orchestrator.commands._output import emit_json, say
    from orchestrator.pools.isolation.choose import MODES, ensure_images
    from orchestrator.scheduler import execute, newest

    if isolation is not None and isolation not in MODES:
        raise UsageError(f"{isolation!r} is not an isolation", field="--isolation", fix=f"one of {', '.join(MODES)}")
    plan, root = load_plan(matrix, only or (), settings or ())
    ensure_images(plan, isolation, matrix)
    for warning in plan.warnings:
        say(f"note: {warning}")
    path = out or (newest(RUNS, plan.name) if resume else _fresh(RUNS, plan.name))
    if path is None:
        raise UsageError(
            f"there is no run of {plan.name} in {RUNS}/", field="--resume", fix="name its folder with --out"
        )
    session = execute(plan, path.resolve(), resume=resume, root=root, isolation=isolation)
    again = shlex.join(
        ["orchestrator", "run", str(matrix), *(f"--set={s}" for s in settings or ()), "--resume", f"--out={path}"]
    )
    if session.interrupted is not None:
        say(f"{session.stop_reason}; what was finished is kept. Go on with: {again}")
        raise typer.Exit(int(session.interrupted))

    from moegate.records import to_json
    from orchestrator.commands._conclude import conclude

    verdict = conclude(path.resolve(), github=github)
    if as_json:
        emit_json({**to_json(verdict), "run": str(path), "report": str(path / "report.html")})
    else:
        for reason in verdict.reasons:
            print(f"  {reason.message}" if reason.cell is None else f"  {_label(plan, reason.cell)}: {reason.message}")
        print(verdict.sentence)
        print(f"report: {path / 'report.html'}")
    raise typer.Exit(int(Exit(verdict.exit)))


def _label(plan: Plan, cell: str) -> str:
    return next((planned.label for planned in plan.cells if planned.id == cell), cell)


def _fresh(runs: Path, name: str) -> Path:
    """A run directory that is not there yet: name and UTC time, with a number where two start in one second."""
    from datetime import UTC, datetime

    base = f"{name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    path, number = runs / base, 2
    while path.exists():
        path, number = runs / f"{base}-{number}", number + 1
    return path
