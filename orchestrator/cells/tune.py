"""tune: `tuner tune`, both projections together; what it writes is the `tuned` arm of this run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moegate.records import Measurement
from orchestrator.cells.base import Axis, CellSpec, Command, Dtype, Engine, Kind, Work
from orchestrator.scalars import Line, Many, Name, Natural

__all__ = ["KIND", "OUTPUT"]

OUTPUT = "tuned"
"""Folder of a launch that holds the tuned tree, moved to `configs/<cell id>` once the cell has passed."""


class TuneSpec(CellSpec):
    """Search configs for the shapes of a model."""

    kind: Literal["tune"]
    pools: Many[Name]
    models: Many[Name]
    ops: Many[Line] = Field(default=["fused_experts"])
    dtypes: Many[Dtype] | None = Field(default=None, description="default: the model's own")
    batch_sizes: Many[Natural] | None = Field(default=None, description="default: those of the effort")
    engine: Many[Engine] = Field(default=["moegate"])
    effort: Literal["quick", "full", "exhaustive"] = "full"


def _command(work: Work) -> Command:
    assert work.model is not None
    argv = [
        *work.programs["tuner"],
        "tune",
        f"--model={work.model.config}",
        f"--op={work.axis('op')}",
        f"--dtype={work.axis('dtype')}",
        f"--effort={work.axis('effort')}",
        *work.sharding(),
    ]
    if work.cell.axes.get("batch_sizes"):
        argv.append(f"--batch-sizes={work.axis('batch_sizes')}")
    if work.axis("engine") != "moegate":
        argv.append(f"--engine={work.axis('engine')}")
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
    axes=(
        Axis("pools", "pool"),
        Axis("models", "model"),
        Axis("ops", "op"),
        Axis("dtypes", "dtype"),
        Axis("batch_sizes", "batch_sizes", multiplies=False),
        Axis("engine", "engine"),
        Axis("effort", "effort", multiplies=False),
    ),
    timeout_s=3600.0,
    seconds=(40.0, 400.0),
    command=_command,
    judge=_judge,
)
