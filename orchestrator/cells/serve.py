"""serve: one server and one load client per launch, two arms (`serving launch -- serving bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moegate.turns import FOLDER, ROUNDS
from orchestrator.cells.base import Axis, CellSpec, Command, Engine, Graph, Kind, Work, one_launch
from orchestrator.scalars import Backend, Bool, Many, Name, Natural, Rate, Whole, fail

__all__ = ["KIND", "Load", "server"]


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


class ServeSpec(CellSpec):
    """The model served under both arms."""

    kind: Literal["serve"]
    pools: Many[Name]
    models: Many[Name]
    engine: Many[Engine] = Field(default=["moegate"])
    moe_runner_backend: Many[Backend] = Field(default=["auto"])
    graph: Many[Graph] = Field(default=["eager"])
    load: Many[Load]
    residency: Literal["both", "swap"] = Field(
        default="swap", description="keep both servers resident, or one at a time"
    )
    arms: Many[Name] | None = Field(default=None, description="default: compare's baseline and candidate")
    aa: Bool = Field(default=False, description="run the baseline against itself")


def server(work: Work) -> list[str]:
    """The `serving launch` part of a command line, up to `--`."""
    assert work.model is not None
    model = work.model
    argv = [
        *work.programs["serving"],
        "launch",
        f"--engine={work.axis('engine')}",
        f"--model={model.config}",
        f"--weights={model.weights}",
        f"--dtype={work.cell.axes['dtype']}",
        f"--moe-runner-backend={work.axis('moe_runner_backend')}",
        f"--graph={work.axis('graph')}",
        f"--configs={work.config_argument()}",
        "--port=0",
        f"--seed={work.seed}",
    ]
    argv += work.sharding()
    return argv


def reads(work: Work) -> tuple[Path, ...]:
    """What a server reads: the model's folder, its weights and the arm's configs."""
    assert work.model is not None
    paths = [Path(work.model.config)]
    paths += [Path(work.model.weights)] if work.model.weights != "random" else []
    paths += [work.configs] if work.configs else []
    return tuple(paths)


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
        Axis("pools", "pool"),
        Axis("models", "model"),
        Axis("engine", "engine"),
        Axis("moe_runner_backend", "moe_runner_backend"),
        Axis("graph", "graph"),
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
