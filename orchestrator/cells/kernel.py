"""What kernel-bench and tune share: one operator in the shapes of a model."""

from __future__ import annotations

from pydantic import Field

from orchestrator.cells.base import MODEL, POOL, Axis, CellSpec, Dtype, Engine, Op, Work
from orchestrator.scalars import Many, Name

__all__ = ["KERNEL", "KernelSpec", "problem"]

KERNEL = (
    POOL,
    MODEL,
    Axis("ops", "op"),
    Axis("dtypes", "dtype"),
    Axis("batch_sizes", "batch_sizes", multiplies=False),
    Axis("engine", "engine"),
)
"""The axes of an operator, in the order of labels."""


class KernelSpec(CellSpec):
    """The keys of an operator."""

    pools: Many[Name]
    models: Many[Name]
    ops: Many[Op] = Field(default=["fused_experts"])
    dtypes: Many[Dtype] | None = Field(default=None, description="default: the model's own")
    engine: Many[Engine] = Field(default=["moegate"])


def problem(work: Work) -> list[str]:
    """What is timed or tuned, as the options of `tuner bench` and `tuner tune`."""
    assert work.model is not None
    engine = work.axis("engine")
    return [
        f"--model={work.model.config}",
        f"--op={work.axis('op')}",
        f"--dtype={work.axis('dtype')}",
        *work.sharding(),
        *([f"--engine={engine}"] if engine != "moegate" else []),
    ]
