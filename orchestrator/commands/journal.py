"""`orchestrator journal`: read a run's journal, or check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]

_RUNDIR = typer.Argument(metavar="RUNDIR", help="A run directory, or a journal file.")


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(
        help="Read or check the journal of a run.",
        epilog="Example: orchestrator journal verify runs/cpu-20270101-120000",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("show", epilog="Example: orchestrator journal show runs/cpu-20270101-120000")(show)
    group.command("verify", epilog="Example: orchestrator journal verify runs/cpu-20270101-120000")(verify)
    app.add_typer(group, name="journal")


def _file(path: Path) -> Path:
    return path / "journal" if path.is_dir() else path


def show(
    rundir: Annotated[Path, _RUNDIR],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print every entry, oldest first."""
    import json

    from moegate import journal
    from moegate.text import plain
    from orchestrator.commands._output import emit_json

    entries = journal.read(_file(rundir))
    if as_json:
        emit_json([{"seq": e.seq, "time": e.time, "kind": e.kind, "data": e.data} for e in entries])
        return
    for entry in entries:
        print(plain(f"{entry.seq:5} {entry.time} {entry.kind:7} {json.dumps(entry.data, sort_keys=True)}"))


def verify(
    rundir: Annotated[Path, _RUNDIR],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check every entry's sum and order, and that each finished attempt's result is what it was. Exit 2 where not."""
    from moegate import journal
    from orchestrator.commands._output import emit_json
    from orchestrator.scheduler import RunDir, read_cells

    file = _file(rundir)
    entries = journal.read(file)
    checked = 0
    for cell, history in read_cells(entries).items():
        for attempt in history.attempts:
            if attempt.state == "PASSED" and attempt.result is not None:
                RunDir(file.parent).result_file(cell, attempt.number, attempt.result, attempt.result_sha256)
                checked += 1
    if as_json:
        emit_json({"entries": len(entries), "results": checked, "intact": True})
    else:
        print(f"{len(entries)} entries and {checked} results are intact")
