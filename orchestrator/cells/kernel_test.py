"""kernel-test: `tuner verify`, an operator against its twin."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moegate.records import Measurement
from orchestrator.cells.base import Axis, CellSpec, Command, Dtype, Kind, Work
from orchestrator.scalars import Line, Many, Name

__all__ = ["KIND"]


class KernelTestSpec(CellSpec):
    """Every backend of an operator must agree with its float32 twin."""

    kind: Literal["kernel-test"]
    pools: Many[Name]
    ops: Many[Line] = Field(default=["fused_experts"], description="operators of xkernels")
    dtypes: Many[Dtype] = Field(default=["bfloat16"], description="dtypes of activations and weights")


def _command(work: Work) -> Command:
    argv = (
        *work.programs["tuner"],
        "verify",
        f"--ops={work.axis('op')}",
        f"--dtypes={work.axis('dtype')}",
        "--backend=all",
        f"--out={work.out}",
    )
    return Command(argv)


def _judge(work: Work, measurement: Measurement) -> str | None:
    failed = [case for case in measurement.cases if case.status == "failed"]
    if failed:
        return f"{len(failed)} of {len(measurement.cases)} cases failed, first {failed[0].name}: {failed[0].message}"
    if not any(case.status == "passed" for case in measurement.cases):
        return "no case was verified (skipped cases are not work)"
    return None


KIND = Kind(
    name="kernel-test",
    spec=KernelTestSpec,
    axes=(Axis("pools", "pool"), Axis("ops", "op"), Axis("dtypes", "dtype")),
    timeout_s=900.0,
    seconds=(6.0, 30.0),
    command=_command,
    judge=_judge,
)
