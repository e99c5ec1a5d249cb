"""`orchestrator gate`: judge a run again from its records, or the gate itself by simulation."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.text import plain
from orchestrator.commands._output import emit_json
from orchestrator.commands._words import ensure_companions

if TYPE_CHECKING:
    from moegate.records import GateResult
    from orchestrator.gate.selftest import SelfTest

_EXAMPLE = """\b
Examples:
  orchestrator gate runs/default-20260102-030405
  orchestrator gate --selftest --cells 300 --runs 400 --sd 0.01 --shift 0.03 --shifted 5 --outliers 0.05 --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(name="gate", epilog=_EXAMPLE)(gate_command)


_OF_SELFTEST = ("cells", "runs", "sd", "shift", "shifted", "outliers", "drift", "seed")


def gate_command(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(metavar="RUNDIR", help="Run directory, finished or not.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    inconclusive: Annotated[str | None, typer.Option(help="Override the policy: warn or fail.")] = None,
    required: Annotated[
        list[str] | None, typer.Option(help="GLOB of cells that must conclude; adds to the policy.")
    ] = None,
    selftest: Annotated[bool, typer.Option("--selftest", help="Simulate the gate's false alarms and power.")] = False,
    cells: Annotated[int, typer.Option(min=1, max=100_000, help="Self test: cells per run.")] = 300,
    runs: Annotated[int, typer.Option(min=1, max=100_000, help="Self test: A/A runs, and as many shifted ones.")] = 400,
    sd: Annotated[float, typer.Option(min=0.0, max=1.0, help="Self test: median pair sd, log ratio.")] = 0.01,
    shift: Annotated[float, typer.Option(min=-1.0, max=1.0, help="Self test: slowdown, log ratio.")] = 0.03,
    shifted: Annotated[int, typer.Option(min=0, max=100_000, help="Self test: how many cells are slower.")] = 5,
    outliers: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Self test: share of pairs five times as wide.")
    ] = 0.05,
    drift: Annotated[float, typer.Option(min=-1.0, max=1.0, help="Self test: linear drift over a stage.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Self test: seed.")] = 0,
) -> None:
    """Judge a run: exit 0 pass, 1 regression or failed cells, 3 missing answers, 4 inconclusive where that fails."""
    ensure_companions(context, dict.fromkeys(_OF_SELFTEST, "selftest"))
    if selftest:
        if run is not None:
            raise UsageError("judges either a run directory or itself", field="--selftest", fix="leave RUNDIR out")
        if inconclusive is not None or required:
            raise UsageError("overrides the policy of a run", field="--required" if required else "--inconclusive",
                             fix="leave it out: the self test has a policy of its own")  # fmt: skip
        if shifted > cells:
            raise UsageError(f"{shifted} of {cells} cells cannot be slower", field="--shifted")
        from orchestrator.gate.selftest import World
        from orchestrator.gate.selftest import selftest as simulate

        result = simulate(World(cells, runs, sd, shift, shifted, outliers, seed, drift))
        _print_selftest(result, as_json=as_json)
        raise typer.Exit(int(_selftest_exit(result)))
    if run is None:
        raise UsageError("needs a run directory", field="RUNDIR", fix="orchestrator gate runs/NAME, or --selftest")
    answer = judge(run, inconclusive=inconclusive, required=tuple(required or ()))
    _print_gate(answer, as_json=as_json)
    raise typer.Exit(answer.exit)


def judge(run: Path, *, inconclusive: str | None = None, required: tuple[str, ...] = ()) -> GateResult:
    """Compare and gate a run directory from its records. Raises UsageError where it is none, or for a bad override."""
    from orchestrator.bundle import read_run
    from orchestrator.compare import compare
    from orchestrator.gate import gate

    facts = read_run(run)
    policy = replace(facts.plan.gate, required=facts.plan.gate.required + required)
    if inconclusive is not None:
        if inconclusive not in ("warn", "fail"):
            raise UsageError(f"is {inconclusive!r}", field="--inconclusive", fix="warn or fail")
        policy = replace(policy, inconclusive="warn" if inconclusive == "warn" else "fail")
    plan = replace(facts.plan, gate=policy)
    return gate(plan, facts.outcomes, compare(plan, facts.measurements))


def _print_gate(result: GateResult, *, as_json: bool) -> None:
    from moegate.records import to_json

    if as_json:
        emit_json(to_json(result))
        return
    typer.echo(plain(result.sentence))
    for reason in result.reasons:
        cell = f"{reason.cell}: " if reason.cell else ""
        typer.echo(f"  [{reason.exit}] {plain(cell + reason.message)}")


def _print_selftest(result: SelfTest, *, as_json: bool) -> None:
    if as_json:
        emit_json(asdict(result))
        return
    from moegate.stats import clopper_pearson

    rate = clopper_pearson(result.false_alarm_runs, result.runs)
    typer.echo(
        f"false alarms   {rate.events} of {rate.trials} A/A runs (at most {100 * rate.high:.2f} %, two-sided 95 %)"
    )
    typer.echo(f"power          {result.power:.3f} of the slower cells found")
    typer.echo(f"cost           {result.mean_pairs_per_cell:.2f} pairs per cell in A/A runs")


def _selftest_exit(result: SelfTest) -> Exit:
    """1 where the simulation proves (95 %) that more than one A/A run in a hundred raises a false alarm."""
    from moegate.stats import clopper_pearson

    return Exit.REGRESSION if clopper_pearson(result.false_alarm_runs, result.runs).low > 0.01 else Exit.OK
