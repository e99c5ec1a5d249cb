"""A stage of a cell on its way through the scheduler: waiting, then running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moegate.records import PlannedCell
from orchestrator.cells import KINDS
from orchestrator.pools.discovery import devices
from orchestrator.pools.leases import Lease
from orchestrator.pools.slots import Slot
from orchestrator.scheduler.job import Stage

__all__ = ["Running", "Todo", "host_slot"]


@dataclass
class Todo:
    """A stage of a cell that should run."""

    cell: PlannedCell
    stage: Stage
    place: int
    device: str | None = None
    screen: tuple[float, ...] = ()
    tries: int = 0
    adopt: Path | None = None

    @property
    def priority(self) -> tuple[int, int]:
        """Host work first, then everything that has not been looked at, then confirmations; each in plan order."""
        first = 0 if KINDS[self.cell.kind].host else 2 if self.stage == "confirm" else 1
        return first, self.place


@dataclass
class Running:
    """A stage that has its lease and its attempt number."""

    todo: Todo
    lease: Lease | None
    slot: Slot
    number: int
    key: str


def host_slot() -> Slot:
    """The place of cells that run on the orchestrator's host, without a pool."""
    return Slot("host", 0, devices("cpu", 1)[0])
