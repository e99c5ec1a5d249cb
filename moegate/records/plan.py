"""What a run is going to do: the expanded matrix (`plan.json`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

__all__ = [
    "LEAST_Q",
    "MOST_CELLS",
    "MOST_PAIRS",
    "ArmSpec",
    "ComparePolicy",
    "GatePolicy",
    "ImageSpec",
    "ModelSpec",
    "Plan",
    "PlannedCell",
    "PoolSpec",
    "QuarantineRule",
]

CellKind = Literal["check", "kernel-test", "kernel-bench", "tune", "serve", "accuracy"]
Family = Literal["kernel", "serving", "control"]

MOST_CELLS = 100_000
"""Cells of a plan."""

MOST_PAIRS = 500
"""Pairs of a stage: many times what any policy asks for, and few enough to hold all their pairwise means in memory."""

LEAST_Q = 1e-12
"""The strictest false discovery rate: about what 40 pairs that all agree can prove (2^-40)."""


@dataclass(frozen=True)
class ImageSpec:
    """An image to build, or (`reference`) one that exists."""

    name: str
    dockerfile: str | None = None
    target: str | None = None
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    base: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class PoolSpec:
    """A set of equal device slots. `slots` n needs n devices (on a CPU: n CPU sets)."""

    name: str
    device: Literal["cpu", "cuda", "rocm", "xpu"]
    image: str | None = None
    isolation: Literal["auto", "docker", "process"] = "auto"
    slots: int = 1
    ray: str = "local"
    labels: dict[str, str] = field(default_factory=dict)
    device_name: str | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model by its `config.json`; `config` is the file's absolute path, `digest` its content's sha256."""

    name: str
    config: str
    digest: str
    weights: str = "random"
    revision: str | None = None
    tp: int = 1
    ep: int = 1
    dtype: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class ArmSpec:
    """One side of a comparison. `configs`: `none`, `tuned`, an absolute directory, or `git:REF`."""

    name: str
    configs: str = "none"
    env: dict[str, str] = field(default_factory=dict)
    source: str | None = None


@dataclass(frozen=True)
class ComparePolicy:
    """Which arms are compared and with how many pairs; `futility` None means no early stop."""

    baseline: str
    candidate: str
    expect: Literal["improved", "no_regression", "equal"] = "no_regression"
    screen: int = 5
    confirm: int = 60
    futility: int | None = 10


@dataclass(frozen=True)
class QuarantineRule:
    """Cells that are run but do not gate until a date (ISO, UTC)."""

    cells: str
    reason: str
    until: str


@dataclass(frozen=True)
class GatePolicy:
    """How verdicts become an exit code. Fractions, not percent: margin 0.01 is 1 %."""

    metric: dict[str, str] = field(default_factory=dict)
    margin: float = 0.01
    q: float = 0.01
    tolerance: float = 0.02
    inconclusive: Literal["warn", "fail"] = "warn"
    required: tuple[str, ...] = ()
    budget_s: float | None = None
    tiers: dict[str, str] = field(default_factory=dict)
    quarantine: tuple[QuarantineRule, ...] = ()


@dataclass(frozen=True)
class PlannedCell:
    """One cell: everything but the arm.

    `axes` holds the values of the kind's axes (JSON scalars and lists). `needs` are the ids of cells whose outputs
    this one reads. `control` marks a cell whose config lookup is unreachable: tuning must not move it. `label` is a
    short human name that GLOBs of the gate and `--only` match, besides the id. `estimate_s` is how long it may take in
    all, `screen_s` what of that its screening takes (None: it has one stage, or that is not known).
    """

    id: str
    kind: CellKind
    label: str
    axes: dict[str, Any]
    why: str
    timeout_s: float
    arms: tuple[str, ...] = ()
    pool: str | None = None
    model: str | None = None
    family: Family | None = None
    control: bool = False
    aa: bool = False
    needs: tuple[str, ...] = ()
    retries: int = 1
    estimate_s: float | None = None
    screen_s: float | None = None

    @property
    def null(self) -> bool:
        """Whether nothing may move here: a control, whose config lookup is unreachable, or an A/A cell."""
        return self.control or self.aa

    @property
    def judged_in(self) -> Family:
        """The family it is judged in: what the plan says, else by kind; controls and A/A cells are their own."""
        if self.null:
            return "control"
        return self.family or ("kernel" if self.kind == "kernel-bench" else "serving")

    def matches(self, glob: str) -> bool:
        """Whether a GLOB of `--only`, `required` or `quarantine` means this cell, by label or by id."""
        return fnmatchcase(self.label, glob) or fnmatchcase(self.id, glob)


@dataclass(frozen=True)
class Plan:
    """A run, decided. Everything that the later stages need, so that the matrix itself is read once."""

    name: str
    matrix: str
    matrix_digest: str
    created: str
    version: str
    cells: tuple[PlannedCell, ...]
    pools: tuple[PoolSpec, ...]
    models: tuple[ModelSpec, ...]
    arms: tuple[ArmSpec, ...]
    images: tuple[ImageSpec, ...]
    compare: ComparePolicy | None
    gate: GatePolicy
    warnings: tuple[str, ...] = ()
    seed: int = 0
    schema: int = 1

    def cell(self, cell_id: str) -> PlannedCell:
        """Return the cell with this id (KeyError where there is none)."""
        for cell in self.cells:
            if cell.id == cell_id:
                return cell
        raise KeyError(cell_id)
