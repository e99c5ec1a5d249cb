"""accuracy: the same samples under both arms, one launch each (`serving launch -- serving accuracy`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moegate.records import Measurement
from orchestrator.cells.base import Axis, CellSpec, Command, Engine, Graph, Kind, Work
from orchestrator.cells.serve import reads, server
from orchestrator.scalars import Backend, Many, Name, PathText

__all__ = ["KIND"]


class AccuracySpec(CellSpec):
    """Non-inferiority of the candidate over identical samples."""

    kind: Literal["accuracy"]
    pools: Many[Name]
    models: Many[Name]
    engine: Many[Engine] = Field(default=["moegate"])
    moe_runner_backend: Many[Backend] = Field(default=["auto"])
    graph: Many[Graph] = Field(default=["eager"])
    samples: PathText = Field(description="a .jsonl file of samples with ids")
    arms: Many[Name] | None = Field(default=None, description="default: compare's baseline and candidate")


def _command(work: Work) -> Command:
    samples = work.axis("samples")
    client = [*work.programs["serving"], "accuracy", f"--samples={samples}", f"--out={work.out}"]
    return Command((*server(work), "--", *client), reads=(*reads(work), Path(samples)), network="loopback")


def _judge(work: Work, measurement: Measurement) -> str | None:
    if len(measurement.launches) != 1:
        return f"an accuracy launch is one launch, the result holds {len(measurement.launches)}"
    return None


KIND = Kind(
    name="accuracy",
    spec=AccuracySpec,
    axes=(
        Axis("pools", "pool"),
        Axis("models", "model"),
        Axis("engine", "engine"),
        Axis("moe_runner_backend", "moe_runner_backend"),
        Axis("graph", "graph"),
        Axis("samples", "samples", multiplies=False),
    ),
    timeout_s=3600.0,
    seconds=(30.0, 600.0),
    command=_command,
    judge=_judge,
    arms=True,
    family="serving",
)
