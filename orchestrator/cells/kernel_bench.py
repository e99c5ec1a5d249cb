"""kernel-bench: `tuner bench`, one process per launch, two arms."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from orchestrator.cells.base import Axis, CellSpec, Command, Dtype, Engine, Graph, Kind, Work, one_launch
from orchestrator.scalars import Backend, Bool, Line, Many, Name, Natural

__all__ = ["KIND"]


class KernelBenchSpec(CellSpec):
    """The operator alone, under both arms."""

    kind: Literal["kernel-bench"]
    pools: Many[Name]
    models: Many[Name]
    ops: Many[Line] = Field(default=["fused_experts"])
    dtypes: Many[Dtype] | None = Field(default=None, description="default: the model's own")
    batch_sizes: Many[Natural] = Field(default=[1, 16, 64, 256])
    engine: Many[Engine] = Field(default=["moegate"])
    moe_runner_backend: Many[Backend] = Field(default=["triton"])
    graph: Many[Graph] = Field(default=["eager"])
    arms: Many[Name] | None = Field(default=None, description="default: compare's baseline and candidate")
    aa: Bool = Field(default=False, description="run the baseline against itself")


def _command(work: Work) -> Command:
    assert work.model is not None
    argv = [
        *work.programs["tuner"],
        "bench",
        f"--model={work.model.config}",
        f"--op={work.axis('op')}",
        f"--dtype={work.axis('dtype')}",
        f"--batch-sizes={work.axis('batch_sizes')}",
        f"--configs={work.config_argument()}",
        f"--moe-runner-backend={work.axis('moe_runner_backend')}",
        f"--graph={work.axis('graph')}",
        f"--seed={work.seed}",
        *work.sharding(),
    ]
    if work.axis("engine") != "moegate":
        argv.append(f"--engine={work.axis('engine')}")
    argv.append(f"--out={work.out}")
    reads = (Path(work.model.config), *((work.configs,) if work.configs else ()))
    return Command(tuple(argv), reads=reads)


KIND = Kind(
    name="kernel-bench",
    spec=KernelBenchSpec,
    axes=(
        Axis("pools", "pool"),
        Axis("models", "model"),
        Axis("ops", "op"),
        Axis("dtypes", "dtype"),
        Axis("batch_sizes", "batch_sizes", multiplies=False),
        Axis("engine", "engine"),
        Axis("moe_runner_backend", "moe_runner_backend"),
        Axis("graph", "graph"),
    ),
    timeout_s=600.0,
    seconds=(5.0, 20.0),
    command=_command,
    judge=one_launch,
    arms=True,
    paired=True,
    family="kernel",
)
