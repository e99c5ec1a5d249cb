"""What every kind of cell has: its axes in the matrix, the command that it is started as, and what makes it pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moegate.records import ArmSpec, Measurement, ModelSpec, PlannedCell, PoolSpec
from moegate.records.plan import CellKind, Family
from orchestrator.pools.isolation import PYTHON
from orchestrator.scalars import Duration, Line, Whole

__all__ = [
    "AA",
    "ARMS",
    "MODEL",
    "POOL",
    "PROGRAMS",
    "PYTHON",
    "Axis",
    "CellSpec",
    "Command",
    "Kind",
    "Programs",
    "Work",
    "one_launch",
]

Programs = Mapping[str, tuple[str, ...]]
PROGRAMS: Programs = {name: (PYTHON, "-P", "-m", name) for name in ("orchestrator", "tuner", "serving")}
"""How our programs are started: by module, with `-P`, so that no file of the working directory is imported."""

Engine = Literal["moegate", "sglang", "vllm"]
Graph = Literal["eager", "full"]
Op = Literal["fused_experts"]
"""Whose shapes a model's config tells; others are for `tuner` with a `--shape`."""
Dtype = Literal["bfloat16", "float16", "float32", "fp8_w8a8", "mxfp4_w4a16"]


class CellSpec(BaseModel):
    """The keys that every kind takes, besides its own axes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    include: list[dict[str, Any]] = Field(
        default=[], description="further points; axes not named keep this cell's values"
    )
    exclude: list[dict[Line, Any]] = Field(default=[], description="points left out: all named axes must be equal")
    timeout: Duration | None = Field(default=None, description="per launch (per command for kinds without arms)")
    retries: Whole | None = Field(default=None, description="how often DEVICE_LOST and INFRA_ERROR are tried again")


@dataclass(frozen=True)
class Axis:
    """One axis of a kind: its key in the matrix, its name in a cell, and whether each value makes a cell of its own."""

    key: str
    name: str
    multiplies: bool = True


POOL, MODEL = Axis("pools", "pool"), Axis("models", "model")
"""The axes that most kinds begin with."""

ARMS = Field(default=None, description="default: compare's baseline and candidate")
AA = Field(default=False, description="run the baseline against itself")
"""The keys of kinds that compare two arms."""


@dataclass(frozen=True)
class Work:
    """Everything that a command line is made from: one launch of one cell."""

    cell: PlannedCell
    model: ModelSpec | None
    pool: PoolSpec | None
    arm: ArmSpec | None
    configs: Path | None
    folder: Path
    seed: int
    programs: Programs = field(default_factory=lambda: PROGRAMS)

    @property
    def out(self) -> Path:
        """The measurement file that the command writes."""
        return self.folder / "measurement.json"

    def axis(self, name: str) -> str:
        """One axis value as a command-line argument (lists joined by commas)."""
        value = self.cell.axes[name]
        return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)

    def sharding(self) -> list[str]:
        """How the model is spread over devices, as the options of every command that reads a model."""
        assert self.model is not None
        sizes = {"tp": self.model.tp, "ep": self.model.ep}
        return [f"--{name}={size}" for name, size in sizes.items() if size > 1]

    def config_argument(self) -> str:
        """The value of `--configs`: the arm's tree, or `none`."""
        return "none" if self.configs is None else str(self.configs)


@dataclass(frozen=True)
class Command:
    """An argument vector, and what it touches. `reads` are absolute."""

    argv: tuple[str, ...]
    reads: tuple[Path, ...] = ()
    network: Literal["none", "loopback"] = "none"


def one_launch(work: Work, measurement: Measurement) -> str | None:
    """Judge a kind whose command is one launch: a result that holds several, or none, does not count."""
    found = len(measurement.launches)
    return None if found == 1 else f"one {work.cell.kind} command is one launch, the result holds {found}"


@dataclass(frozen=True)
class Kind:
    """One kind of cell.

    Attributes:
        name: as in the matrix.
        spec: the pydantic model of its keys.
        axes: in the order in which cells multiply and labels are written.
        arms: whether it compares two arms; `paired` whether launches are paired (else one launch per arm).
        family: which family its verdicts belong to.
        timeout_s: default deadline of a launch.
        seconds: rough cost of one launch on (cpu, gpu), until there is history.
        command: the command line of one launch.
        judge: why a measurement that the generic rules accept still does not count, or None.
        collect: reads the measurement of a launch's folder where the command does not write one itself.
        host: runs on the orchestrator's host, without a pool.
    """

    name: CellKind
    spec: type[CellSpec]
    axes: tuple[Axis, ...]
    timeout_s: float
    seconds: tuple[float, float]
    command: Callable[[Work], Command]
    judge: Callable[[Work, Measurement], str | None]
    arms: bool = False
    paired: bool = False
    family: Family | None = None
    host: bool = False
    collect: Callable[[Work, int], Measurement] | None = None
