"""`orchestrator compare RUN_A RUN_B`: what changed between two finished runs, or why nothing can be said."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegate.errors import UsageError
from moegate.exits import Exit, worst

if TYPE_CHECKING:
    from orchestrator.compare.across import CrossComparison, CrossVerdict

_EXAMPLE = """\b
Example:
  orchestrator compare runs/main-20260101-020000 runs/branch-20260102-020000
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(name="compare", epilog=_EXAMPLE)(compare_command)


def compare_command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The earlier run directory.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The later run directory.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare the gains of two finished runs: same device, environment, model, load and baseline, or refused.

    Exit 0: nothing regressed; 1: a cell regressed; 2: nothing could be compared; 3: some cells were refused.
    """
    from moegate.records import to_json
    from moegate.text import plain
    from orchestrator.bundle import read_run
    from orchestrator.commands._output import emit_json
    from orchestrator.compare.across import compare_runs

    result = compare_runs(read_run(run_a), read_run(run_b))
    code = exit_of(result)
    if as_json:
        emit_json({"exit": int(code), **to_json(result)})
    else:
        for line in lines(result):
            typer.echo(plain(line))
    if code is Exit.USAGE:
        raise UsageError("the runs cannot be compared", fix="measure both arms in one run: that is what arms are for")
    raise typer.Exit(int(code))


def exit_of(result: CrossComparison) -> Exit:
    """Usage where nothing at all was comparable, else the worst of the cells."""
    if not any(cell.verdict for cell in result.cells):
        return Exit.USAGE
    codes = {"regressed": Exit.REGRESSION, None: Exit.INFRA}
    return worst(codes.get(cell.verdict, Exit.OK) for cell in result.cells)


def lines(result: CrossComparison) -> Iterable[str]:
    """The answer for a terminal."""
    for cell in result.cells:
        yield _line(cell)
    for name, only in (("A", result.only_a), ("B", result.only_b)):
        yield from (f"only in {name:<11} {label}" for label in only)
    if not result.cells:
        yield "the runs have no cell in common"


def _line(cell: CrossVerdict) -> str:
    if cell.verdict is None or cell.change is None or cell.low is None or cell.high is None:
        return f"{'refused':<13} {cell.label}: {cell.reason}"
    change = f"{100 * cell.change:+.2f} % [{100 * cell.low:+.2f}, {100 * cell.high:+.2f}]"
    return f"{cell.verdict:<13} {cell.label}: {change}, {cell.pairs[0]} and {cell.pairs[1]} pairs; {cell.reason}"
