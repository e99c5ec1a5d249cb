"""`orchestrator history list|show|trend|import`: finished runs in one SQLite file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from moegate.text import plain
from orchestrator.commands._output import emit_json

if TYPE_CHECKING:
    from moegate.records.comparison import Verdict
    from orchestrator.history import CellRow, RunRow

_DEFAULT = Path("runs/history.sqlite")

File = Annotated[Path, typer.Option("--db", envvar="MOEGATE_HISTORY", help="The history file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Branch = Annotated[str | None, typer.Option(help="Only runs of this branch.")]


def register(app: typer.Typer) -> None:
    """Add the command group to the command line."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Finished runs over time: trends and baselines.",
        epilog="Example: orchestrator history list --branch main",
        rich_markup_mode=None,
    )
    group.command(name="list", epilog="Example: orchestrator history list --branch main")(list_command)
    group.command(name="show", epilog="Example: orchestrator history show 3f2a")(show_command)
    group.command(name="trend", epilog="Example: orchestrator history trend serve/tiny/triton")(trend_command)
    group.command(name="import", epilog="Example: orchestrator history import runs/*/ --branch main")(import_command)
    app.add_typer(group, name="history")


def import_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNDIR...", help="Run directories.")],
    *,
    db: File = _DEFAULT,
    branch: Annotated[str | None, typer.Option(help="Branch of these runs; default: as recorded.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of these runs; default: as recorded.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import finished runs; what is there is left alone, one that went on since is brought up to date."""
    from orchestrator.commands._conclude import bundle_of, going
    from orchestrator.history import History

    done: list[dict[str, Any]] = []
    bundles = [(path, going(path), bundle_of(path)) for path in runs]  # all readable, or nothing is imported
    with History(db) as history:
        for path, running, bundle in bundles:
            new = not running and history.add(bundle, path=str(path.resolve()), branch=branch, revision=revision)
            done.append({"run": str(path), "imported": new, "running": running})
    _print(done, [f"{_imported(row):<14} {row['run']}" for row in done], as_json)


def _imported(row: dict[str, Any]) -> str:
    """What became of a run that was to be imported."""
    return "imported" if row["imported"] else "still going" if row["running"] else "already there"


def list_command(
    *,
    db: File = _DEFAULT,
    branch: Branch = None,
    limit: Annotated[int, typer.Option(min=1, help="How many runs.")] = 30,
    as_json: AsJson = False,
) -> None:
    """List imported runs, newest first."""
    from moegate.stats import at_most
    from orchestrator.history import open_history, row_json

    with open_history(db) as history:
        rows = history.runs(branch=branch, limit=limit)
        rate = history.aa_rate(branch=branch)
    lines = [_run_line(row) for row in rows]
    if rate.trials:
        most = f"at most {100 * at_most(rate.events, rate.trials):.1f} %, 95 %"
        lines.append(f"A/A cells flagged, all runs: {rate.events} of {rate.trials} ({most})")
    _print([row_json(row) for row in rows], lines, as_json)


def show_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its beginning.")],
    *,
    db: File = _DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show one run with its cells."""
    from orchestrator.history import open_history, row_json

    with open_history(db) as history:
        row = history.run(run)
        cells = history.cells(row)
    value = {"run": row_json(row), "cells": [{**row_json(cell), "run": row.id} for cell in cells]}
    _print(value, [_run_line(row), *(f"  {_cell_text(cell)}  {cell.label}" for cell in cells)], as_json)


def trend_command(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="Id or label of a cell.")],
    *,
    db: File = _DEFAULT,
    branch: Branch = None,
    device_class: Annotated[str | None, typer.Option(help="Such as `cuda:NVIDIA H200`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a cell over time, oldest first, and where its series starts anew."""
    from moegate.errors import UsageError
    from orchestrator.history import open_history, row_json

    with open_history(db) as history:
        points = history.trend(cell, branch=branch, device_class=device_class)
    if not points:
        raise UsageError(f"no run in {db} has a cell {cell!r}", fix="orchestrator history show RUN lists cells")
    text: list[str] = []
    for point in points:
        text += [f"--- {point.changed}"] if point.changed else []
        text.append(f"{point.run.started:<26} {_cell_text(point)}  {point.run.branch}  {point.device_class}")
    _print([row_json(point) for point in points], text, as_json)


def _run_line(row: RunRow) -> str:
    return f"{row.id[:12]}  {row.started:<26} exit {row.exit}  {row.branch or '-'}  {row.name}: {row.sentence}"


def _cell_text(cell: CellRow) -> str:
    if cell.gain is None:
        return f"{_word(cell):<17}"
    interval = f"[{100 * (cell.low or 0.0):+.2f}, {100 * (cell.high or 0.0):+.2f}]"
    return f"{_word(cell):<17} {100 * cell.gain:+.2f} % {interval} {cell.metric}"


def _word(cell: CellRow) -> str:
    """The report's word for what a cell came to."""
    from reports.words import LOOKS, judged

    if cell.verdict is None:
        return "no verdict"
    look = LOOKS.get(judged(cast("Verdict", cell.verdict), null=bool(cell.control or cell.aa)))
    return cell.verdict if look is None else look.word


def _print(value: Any, lines: list[str], as_json: bool) -> None:
    if as_json:
        emit_json(value)
        return
    for line in lines:
        typer.echo(plain(line))
