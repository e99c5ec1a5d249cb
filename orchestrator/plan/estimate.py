"""How long a plan takes: from earlier runs of the same cells where there are any, else from a table per kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from moegate import journal
from moegate.errors import MoegateError
from moegate.records import ComparePolicy, PlannedCell, PoolSpec
from orchestrator.cells import KINDS

__all__ = ["History", "cell_seconds", "launches", "read_history", "run_seconds"]

_RUNS = 5  # of the newest earlier runs


@dataclass(frozen=True)
class History:
    """What cells took before, in seconds, by cell id (the median of whole cells)."""

    seconds: Mapping[str, float]


def launches(cell: PlannedCell, compare: ComparePolicy | None) -> tuple[int, int]:
    """How many launches a cell takes at least and at most."""
    kind = KINDS[cell.kind]
    if not kind.arms or compare is None:
        return 1, 1
    if not kind.paired:
        return 2, 2
    return 2 * compare.screen, 2 * (compare.screen + compare.confirm)


def cell_seconds(cell: PlannedCell, compare: ComparePolicy | None, device: str, history: History) -> float:
    """The expected seconds of a cell. Without history a reachable cell is expected to confirm, a control is not."""
    known = history.seconds.get(cell.id)
    if known is not None:
        return round(known, 1)
    low, high = launches(cell, compare)
    each = KINDS[cell.kind].seconds[0 if device == "cpu" else 1]
    return round(each * (low if cell.control or cell.aa else high), 1)


def run_seconds(due: Iterable[tuple[str | None, float]], pools: Iterable[PoolSpec]) -> float:
    """Until the slowest pool is through, its cells taking turns at its slots. `due`: a cell's pool and its seconds."""
    slots = {pool.name: pool.slots for pool in pools}
    work: dict[str, list[float]] = defaultdict(list)
    for pool, seconds in due:
        work[pool or ""].append(seconds)
    return max((sum(row) / min(len(row), slots.get(pool, 1)) for pool, row in work.items()), default=0.0)


def read_history(runs: Iterable[Path]) -> History:
    """Read the wall times of finished cells from run directories; a damaged or foreign one is passed over."""
    found: dict[str, list[float]] = {}
    newest = sorted((path for path in runs if (path / "journal").is_file()), key=lambda p: p.stat().st_mtime)[-_RUNS:]
    for folder in newest:
        try:
            walls = _walls(journal.read(folder / "journal"))
        except (MoegateError, OSError, TypeError, ValueError, OverflowError):
            continue
        for cell, wall in walls.items():
            found.setdefault(cell, []).append(wall)
    return History({cell: median(values) for cell, values in found.items()})


def _walls(entries: Iterable[journal.Entry]) -> dict[str, float]:
    """Seconds of the passed attempts of each cell that one run brought to its end; a screening alone is no cell."""
    walls: dict[str, float] = {}
    whole: set[str] = set()
    for entry in entries:
        if entry.data.get("state") != "PASSED":
            continue
        cell = str(entry.data.get("cell"))
        if entry.kind == "done":
            walls[cell] = walls.get(cell, 0.0) + float(entry.data.get("wall_s") or 0.0)
        elif entry.kind == "final":
            whole.add(cell)
    return {cell: wall for cell, wall in walls.items() if cell in whole}
