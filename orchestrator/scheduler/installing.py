"""The environments of an attempt's arms: where an arm names a `source`, its launches run that commit's code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.pools.isolation import LaunchResult, LaunchSpec
from orchestrator.scheduler.job import AttemptJob
from orchestrator.sources import Environment

__all__ = ["environments"]

_TIMEOUT_S = 180.0


def environments(job: AttemptJob) -> dict[str, Environment]:
    """Arm -> the environment of its commit, for arms that name one; made where the cache lacks it.

    An environment is made by the interpreter that will use it, which under Docker is the image's: so this is one more
    launch on the attempt's own lease, with the attempt's logs.

    Raises:
        InfraError: a commit cannot be installed.
    """

    def start(argv: tuple[str, ...], writes: Path, reads: Sequence[Path]) -> LaunchResult:
        spec = LaunchSpec(
            run=job.run,
            cell=job.cell.id,
            attempt=job.number,
            number=0,
            argv=argv,
            workdir=writes,
            stdout=job.folder / "stdout.log",
            stderr=job.folder / "stderr.log",
            timeout_s=_TIMEOUT_S,
            slot=job.slot,
            reads=tuple(reads),
            image=job.image,
        )
        return job.isolation.run(spec, on_start=lambda kind, ident: None, cancel=job.cancel)

    named = {name: arm.source for name, arm in job.arms.items() if arm.source is not None}
    return {name: job.sources.prepare(sha, job.isolation, start) for name, sha in named.items()}
