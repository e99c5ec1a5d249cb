"""One result of an attempt's many measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moegate.records import Measurement
from orchestrator.scheduler.job import AttemptJob
from orchestrator.scheduler.keys import host_fingerprint

__all__ = ["merge"]

OWN = "moegate"  # its name among the versions of a measurement


def merge(job: AttemptJob, measurements: list[Measurement]) -> Measurement:
    """One measurement of many: launches in order, work added up, the environment of the first."""
    first = measurements[0]
    work: dict[str, int] = {}
    for measurement in measurements:
        for name, count in measurement.work.items():
            work[name] = work.get(name, 0) + count
    detail: dict[str, Any] = {
        **first.detail,
        "stage": job.stage,
        "attempt": job.number,
        "isolation": job.isolation.name,
        "host": host_fingerprint(),  # where history and `orchestrator compare` see that a machine has changed
    }
    return replace(
        first,
        environment=first.environment | _own_versions(measurements),
        work=work,
        launches=tuple(launch for measurement in measurements for launch in measurement.launches),
        cases=tuple(case for measurement in measurements for case in measurement.cases),
        outputs={name: digest for measurement in measurements for name, digest in measurement.outputs.items()},
        interpreter=any(measurement.interpreter for measurement in measurements),
        detail=detail,
    )


def _own_versions(measurements: list[Measurement]) -> dict[str, str]:
    """Our own version; both where the arms run different commits, whichever of them came first."""
    found = sorted({m.environment[OWN] for m in measurements if OWN in m.environment})
    return {OWN: " | ".join(found)} if found else {}
