"""accuracy: the same samples under both arms, one launch each (`serving launch -- serving accuracy`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from orchestrator.cells.base import Axis, Command, Kind, Work, one_launch
from orchestrator.cells.served import SERVED, ServedSpec, reads, server
from orchestrator.scalars import PathText

__all__ = ["KIND"]


class AccuracySpec(ServedSpec):
    """Non-inferiority of the candidate over identical samples."""

    kind: Literal["accuracy"]
    samples: PathText = Field(description="a .jsonl file of samples with ids")


def _command(work: Work) -> Command:
    samples = work.axis("samples")
    client = [*work.programs["serving"], "accuracy", f"--samples={samples}", f"--out={work.out}"]
    return Command((*server(work), "--", *client), reads=(*reads(work), Path(samples)), network="loopback")


KIND = Kind(
    name="accuracy",
    spec=AccuracySpec,
    axes=(*SERVED, Axis("samples", "samples", multiplies=False)),
    timeout_s=3600.0,
    seconds=(30.0, 600.0),
    command=_command,
    judge=one_launch,
    arms=True,
    family="serving",
)
