"""kernel-bench: `tuner bench`, one process per launch, two arms."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from orchestrator.cells.base import AA, ARMS, Axis, Command, Graph, Kind, Work, one_launch
from orchestrator.cells.kernel import KERNEL, KernelSpec, problem
from orchestrator.scalars import Backend, Bool, Many, Name, Natural

__all__ = ["KIND"]


class KernelBenchSpec(KernelSpec):
    """The operator alone, under both arms."""

    kind: Literal["kernel-bench"]
    batch_sizes: Many[Natural] = Field(default=[1, 16, 64, 256])
    moe_runner_backend: Many[Backend] = Field(default=["triton"])
    graph: Many[Graph] = Field(default=["eager"])
    arms: Many[Name] | None = ARMS
    aa: Bool = AA


def _command(work: Work) -> Command:
    assert work.model is not None
    argv = (
        *work.programs["tuner"],
        "bench",
        *problem(work),
        f"--batch-sizes={work.axis('batch_sizes')}",
        f"--configs={work.config_argument()}",
        f"--moe-runner-backend={work.axis('moe_runner_backend')}",
        f"--graph={work.axis('graph')}",
        f"--seed={work.seed}",
        f"--out={work.out}",
    )
    return Command(argv, reads=(Path(work.model.config), *((work.configs,) if work.configs else ())))


KIND = Kind(
    name="kernel-bench",
    spec=KernelBenchSpec,
    axes=(
        *KERNEL,
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
