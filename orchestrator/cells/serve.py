"""serve: one server and one load client per launch, two arms (`serving launch -- serving bench`)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moegate.turns import FOLDER, ROUNDS
from orchestrator.cells.base import AA, Axis, Command, Kind, Work, one_launch
from orchestrator.cells.served import SERVED, ServedSpec, reads, server
from orchestrator.scalars import Bool, Many, Natural, Rate, Whole, fail

__all__ = ["KIND", "Load"]


class Load(BaseModel):
    """What the client sends: a closed loop (`concurrency`) or an open one (`rate`, requests per second)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: Natural
    concurrency: Natural | None = None
    rate: Rate | None = None
    input: Natural = Field(description="prompt tokens of a request")
    output: Natural = Field(description="generated tokens of a request")
    seed: Whole = 0

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if (self.concurrency is None) == (self.rate is None):
            raise fail("needs concurrency or rate, one of them", "write `concurrency: 32` or `rate: 4.0`")
        return self


class ServeSpec(ServedSpec):
    """The model served under both arms."""

    kind: Literal["serve"]
    load: Many[Load]
    residency: Literal["both", "swap"] = Field(
        default="swap", description="keep both servers resident, or one at a time"
    )
    aa: Bool = AA


def _command(work: Work) -> Command:
    load: dict[str, Any] = work.cell.axes["load"]
    client = [*work.programs["serving"], "bench", f"--requests={load['requests']}"]
    client.append(f"--concurrency={load['concurrency']}" if load.get("concurrency") else f"--rate={load['rate']}")
    argv = server(work)
    if work.cell.axes.get("residency") == "both":
        argv.append("--memory-share=0.5")
        client += [f"--rounds={ROUNDS}", f"--turns={work.folder / FOLDER}"]
    client += [f"--input={load['input']}", f"--output={load['output']}", f"--seed={load['seed']}", f"--out={work.out}"]
    return Command((*argv, "--", *client), reads=reads(work), network="loopback")


KIND = Kind(
    name="serve",
    spec=ServeSpec,
    axes=(
        *SERVED,
        Axis("load", "load"),
        Axis("residency", "residency", multiplies=False),
    ),
    timeout_s=1200.0,
    seconds=(6.0, 120.0),
    command=_command,
    judge=one_launch,
    arms=True,
    paired=True,
    family="serving",
)
