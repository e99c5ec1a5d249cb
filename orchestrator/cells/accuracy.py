"""accuracy: the same samples under both arms, one launch each (`serving launch -- serving accuracy`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from orchestrator.cells.base import Axis, CellSpec, Command, Engine, Graph, Kind, Work, one_launch
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
    judge=one_launch,
    arms=True,
    family="serving",
)
