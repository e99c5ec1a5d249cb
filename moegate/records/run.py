"""What happened to each cell, and everything a report is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from moegate.records.comparison import Comparison, GateResult
from moegate.records.measurement import Measurement
from moegate.records.plan import Plan

__all__ = ["FINAL_STATES", "Attempt", "CellOutcome", "RunBundle", "ShellLine", "State", "TrendPoint"]

State = Literal[
    "PLANNED",
    "LEASED",
    "RUNNING",
    "PASSED",
    "FAILED",
    "TIMEOUT",
    "OOM",
    "CRASHED",
    "DEVICE_LOST",
    "INFRA_ERROR",
    "CANCELLED",
    "BLOCKED",
]
FINAL_STATES = frozenset(
    {"PASSED", "FAILED", "TIMEOUT", "OOM", "CRASHED", "DEVICE_LOST", "INFRA_ERROR", "CANCELLED", "BLOCKED"}
)


MOST_WALL_S = 1e9
"""Seconds of an attempt: thirty years."""


@dataclass(frozen=True)
class Attempt:
    """One lease of one stage of a cell. `number` fences: a late result of an older attempt is never taken."""

    number: int
    stage: Literal["only", "screen", "confirm"]
    state: State
    reason: str = ""
    key: str = ""
    started: str = ""
    wall_s: float = 0.0
    device: str = ""
    slot: str = ""
    isolation: str = ""
    result: str | None = None
    result_sha256: str | None = None
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class CellOutcome:
    """A cell's state and the attempts that led to it. `log_tail` is the end of the last attempt's standard error."""

    cell: str
    state: State
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    log_tail: str = ""


@dataclass(frozen=True)
class TrendPoint:
    """One earlier run's answer for a cell; `gain` and its interval are fractions, positive is better."""

    run: str
    time: str
    gain: float
    low: float
    high: float
    verdict: str = ""


@dataclass(frozen=True)
class ShellLine:
    """A line for a shell that does what a launch of a cell did. `arm` is "" where the cell has none."""

    arm: str
    line: str


@dataclass(frozen=True)
class RunBundle:
    """All of a run: what the reports render and what a person can be shown offline.

    `measurements` maps cell id to the results of its finished attempts, in order. `config_files` maps each tuned
    config file (relative name) to its parsed content; `commands` maps cell id to the lines that reproduce it, one per
    arm, the baseline's first.
    `history` maps cell id to earlier runs of the same cell on comparable machines, oldest first; `aa_before` counts
    the A/A cells that all other runs of that history judged, flagged ones first.
    """

    plan: Plan
    outcomes: tuple[CellOutcome, ...]
    measurements: dict[str, tuple[Measurement, ...]]
    comparison: Comparison
    gate: GateResult
    config_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: dict[str, tuple[ShellLine, ...]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    started: str = ""
    finished: str = ""
    history: dict[str, tuple[TrendPoint, ...]] = field(default_factory=dict)
    aa_before: tuple[int, int] = (0, 0)
    schema: int = 1
