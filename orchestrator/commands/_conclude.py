"""From a run directory to its verdict: bundle, compare, gate, and every rendering of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from moegate import records
from moegate.errors import InfraError, UsageError
from moegate.paths import write_atomic
from moegate.records import GateResult, Plan, RunBundle
from orchestrator.bundle import read_run
from orchestrator.commands._output import annotate, say
from orchestrator.compare import compare
from orchestrator.gate import gate
from orchestrator.remember import remember
from orchestrator.scheduler import RunDir

__all__ = ["OUTPUTS", "bundle_of", "conclude", "going"]

_GOING = "the run is still going: what is missing here may yet come, and the history waits for its end"


def _html(bundle: RunBundle) -> str:
    from reports import html

    return html.render(bundle)


def _junit(bundle: RunBundle) -> str:
    from reports import junit

    return junit.render(bundle)


def _sarif(bundle: RunBundle) -> str:
    from reports import sarif

    return sarif.render(bundle, root=Path.cwd())


def _summary(bundle: RunBundle) -> str:
    from reports import summary

    return summary.render(bundle)


OUTPUTS: Mapping[str, Callable[[RunBundle], str]] = {
    "report.html": _html,
    "junit.xml": _junit,
    "results.sarif": _sarif,
    "summary.md": _summary,
}
"""File in the run directory -> what writes it."""


def bundle_of(rundir: Path) -> RunBundle:
    """Read a run, compare and gate it; nothing is written."""
    facts = read_run(rundir)
    comparison = compare(facts.plan, facts.measurements, _moe_layers(facts.plan))
    verdict = gate(facts.plan, facts.outcomes, comparison)
    return RunBundle(
        plan=facts.plan,
        outcomes=facts.outcomes,
        measurements=facts.measurements,
        comparison=comparison,
        gate=verdict,
        config_files=facts.config_files,
        commands=facts.commands,
        environment=facts.environment,
        notes=facts.notes,
        started=facts.started,
        finished=facts.finished,
    )


def going(rundir: Path) -> bool:
    """Whether an orchestrator is at work on a run. To be asked before the run is read: else it may end in between."""
    return RunDir(rundir).holder() is not None


def conclude(rundir: Path, *, github: bool = False) -> GateResult:
    """Judge a run and write comparison.json, gate.json and every report into its directory.

    github: also print annotations for what decided it.

    Raises:
        InfraError: the directory cannot be written.
    """
    unfinished = going(rundir)
    bundle = remember(bundle_of(rundir), rundir, finished=not unfinished)
    if unfinished:
        say(f"note: {_GOING}")
        bundle = replace(bundle, notes=(*bundle.notes, _GOING))
    try:
        records.write(rundir / "comparison.json", bundle.comparison)
        records.write(rundir / "gate.json", bundle.gate)
        for name, render in OUTPUTS.items():
            write_atomic(rundir / name, render(bundle))
    except OSError as error:
        raise InfraError(f"{rundir}: the reports cannot be written: {error.strerror}") from error
    if github:
        from reports import summary

        annotate(summary.annotate(bundle))
    return bundle.gate


def _moe_layers(plan: Plan) -> dict[str, int]:
    """MoE layers per model, for predictions; a config.json that has gone missing since only costs those."""
    from moegate.families import load_layout

    out = {}
    for model in plan.models:
        try:
            out[model.name] = len(load_layout(Path(model.config)).moe_layers)
        except UsageError:
            continue
    return out
