"""check: `orchestrator check` on this host, without a pool or a device."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from moegate import canonical
from moegate.errors import RecordError
from moegate.records import Case, DeviceIdentity, Measurement
from orchestrator.cells.base import Axis, CellSpec, Command, Engine, Kind, Work
from orchestrator.scalars import Many, Name

__all__ = ["KIND"]

_STDOUT = "stdout.json"


class CheckSpec(CellSpec):
    """Config names, pairs, reachability and dispatch order, without a GPU."""

    kind: Literal["check"]
    models: Many[Name] = Field(default=[], description="models whose files must be reachable")
    engine: Many[Engine] = Field(default=["moegate"], description="whose lookup rules apply")


def _command(work: Work) -> Command:
    argv = [*work.programs["orchestrator"], "check", "--json", "--engine", work.axis("engine")]
    if work.model is not None:
        argv += ["--models", work.model.config]
    return Command(tuple(argv))


def _collect(work: Work, returncode: int) -> Measurement:
    """Turn the command's JSON into a measurement: one case per finding of error severity."""
    report = canonical.load_json(work.folder / _STDOUT)
    if not isinstance(report, dict) or not isinstance(report.get("findings"), list):
        raise RecordError("is not the output of `orchestrator check --json`", file=work.folder / _STDOUT)
    findings = [finding for finding in report["findings"] if isinstance(finding, dict)]
    cases = tuple(_case(finding) for finding in findings)
    failed = [case for case in cases if case.status == "failed"]
    return Measurement(
        kind="check",
        status="failed" if failed or returncode else "ok",
        device=DeviceIdentity("cpu", "cpu", "cpu:host"),
        environment={},
        work={"files": int(report.get("files") or 0)},
        cases=cases,
        failure=f"{len(failed)} findings: {failed[0].message}" if failed else None,
        detail={"counts": report.get("counts") or {}},
    )


def _case(finding: dict[str, Any]) -> Case:
    where = str(finding.get("file") or "")
    line = finding.get("line")
    return Case(
        name=f"{finding.get('rule')}: {where}" + (f":{line}" if line else ""),
        status="failed" if finding.get("severity") == "error" else "passed",
        message=str(finding.get("message") or ""),
        detail={"severity": finding.get("severity"), "fix": finding.get("fix")},
    )


def _judge(work: Work, measurement: Measurement) -> str | None:
    return None


KIND = Kind(
    name="check",
    spec=CheckSpec,
    axes=(Axis("models", "model"), Axis("engine", "engine")),
    timeout_s=300.0,
    seconds=(2.0, 2.0),
    command=_command,
    judge=_judge,
    collect=_collect,
    host=True,
)
