"""tune: `tuner tune`, both projections together; what it writes is the `tuned` arm of this run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moegate.records import Measurement
from orchestrator.cells.base import Axis, Command, Kind, Work
from orchestrator.cells.kernel import KERNEL, KernelSpec, problem
from orchestrator.scalars import Many, Natural

__all__ = ["KIND", "OUTPUT"]

OUTPUT = "tuned"
"""Folder of a launch that holds the tuned tree, moved to `configs/<cell id>` once the cell has passed."""


class TuneSpec(KernelSpec):
    """Search configs for the shapes of a model."""

    kind: Literal["tune"]
    batch_sizes: Many[Natural] | None = Field(default=None, description="default: those of the effort")
    effort: Literal["quick", "full", "exhaustive"] = "full"


def _command(work: Work) -> Command:
    assert work.model is not None
    argv = [*work.programs["tuner"], "tune", *problem(work), f"--effort={work.axis('effort')}"]
    if work.cell.axes.get("batch_sizes"):
        argv.append(f"--batch-sizes={work.axis('batch_sizes')}")
    argv += [f"--out={work.folder / OUTPUT}", f"--result={work.out}"]
    return Command(tuple(argv), reads=(Path(work.model.config),))


def _judge(work: Work, measurement: Measurement) -> str | None:
    tree = work.folder / OUTPUT
    if not any(path.is_file() for path in tree.rglob("E=*.json")):
        return "no config file was written"
    escaped = next((path for path in tree.rglob("*") if path.is_symlink()), None)
    return f"{escaped.name} is a link; a tuned tree holds plain files only" if escaped else None


KIND = Kind(
    name="tune",
    spec=TuneSpec,
    axes=(*KERNEL, Axis("effort", "effort", multiplies=False)),
    timeout_s=3600.0,
    seconds=(40.0, 400.0),
    command=_command,
    judge=_judge,
)
