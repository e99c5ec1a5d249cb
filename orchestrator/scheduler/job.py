"""What an attempt is given and what it gives back: the two records between the scheduler and its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moegate import records
from moegate.records import ArmSpec, ImageSpec, ModelSpec, PlannedCell, PoolSpec
from moegate.stats import Rules, Turn
from orchestrator.cells.base import Programs
from orchestrator.pools.isolation import Isolation
from orchestrator.pools.slots import Slot
from orchestrator.sources import Sources

__all__ = ["AttemptDone", "AttemptJob", "Stage"]

Stage = Literal["only", "screen", "confirm"]


@dataclass(frozen=True)
class AttemptJob:
    """What an attempt needs to know. Read-only; everything that changes is in its folder."""

    run: str
    cell: PlannedCell
    stage: Stage
    number: int
    folder: Path
    slot: Slot
    isolation: Isolation
    model: ModelSpec | None
    pool: PoolSpec | None
    image: ImageSpec | None
    arms: Mapping[str, ArmSpec]
    trees: Mapping[str, Path | None]
    rules: Rules | None
    metric: str | None
    seed: int
    screen: tuple[float, ...]
    programs: Programs
    sources: Sources
    cancel: threading.Event
    out_of_time: Callable[[], bool]
    before_launch: Callable[[int, Turn | None], None]
    log: Callable[[str], None]
    adopt: Path | None = None


@dataclass
class AttemptDone:
    """How an attempt ended. `ratios` are the log ratios of its valid pairs, `commands` what was executed."""

    state: records.State
    reason: str = ""
    retry: bool = False
    result: Path | None = None
    result_sha256: str | None = None
    wall_s: float = 0.0
    device: str = ""
    ratios: tuple[float, ...] = ()
    commands: list[tuple[str, ...]] = field(default_factory=list)
