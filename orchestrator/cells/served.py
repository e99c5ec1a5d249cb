"""What serve and accuracy share: a server of a model under two arms."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from orchestrator.cells.base import ARMS, MODEL, POOL, Axis, CellSpec, Engine, Graph, Work
from orchestrator.scalars import Backend, Many, Name

__all__ = ["SERVED", "ServedSpec", "reads", "server"]

SERVED = (
    POOL,
    MODEL,
    Axis("engine", "engine"),
    Axis("moe_runner_backend", "moe_runner_backend"),
    Axis("graph", "graph"),
)
"""The axes of a server, in the order of labels."""


class ServedSpec(CellSpec):
    """The keys of a server."""

    pools: Many[Name]
    models: Many[Name]
    engine: Many[Engine] = Field(default=["moegate"])
    moe_runner_backend: Many[Backend] = Field(default=["auto"])
    graph: Many[Graph] = Field(default=["eager"])
    arms: Many[Name] | None = ARMS


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
