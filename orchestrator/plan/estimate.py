"""How long a plan takes: from earlier runs of the same cells where there are any, else from a table per kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from moegate import journal
from moegate.errors import MoegateError
from moegate.paths import is_file
from moegate.records import ComparePolicy, PlannedCell, PoolSpec
from moegate.records.run import MOST_WALL_S
from orchestrator.cells import KINDS

__all__ = ["History", "duration", "estimated", "launches", "read_history", "run_seconds", "stage_seconds"]

_RUNS = 5  # of the newest earlier runs


@dataclass(frozen=True)
class History:
    """What cells took before, in seconds, by cell id (the median of whole cells), and what of it their screening."""

    seconds: Mapping[str, float]
    screens: Mapping[str, float] = field(default_factory=dict)


def launches(cell: PlannedCell, compare: ComparePolicy | None) -> tuple[int, int]:
    """How many launches a cell takes at least and at most."""
    kind = KINDS[cell.kind]
    if not kind.arms or compare is None:
        return 1, 1
    if not kind.paired:
        return 2, 2
    return 2 * compare.screen, 2 * (compare.screen + compare.confirm)


def estimated(cell: PlannedCell, compare: ComparePolicy | None, device: str, history: History) -> PlannedCell:
    """The cell with the seconds that it may take.

    Without history a reachable cell is expected to confirm, a control is not.
    """
    known, screen = history.seconds.get(cell.id), history.screens.get(cell.id)
    if known is None:
        low, high = launches(cell, compare)
        each = KINDS[cell.kind].seconds[0 if device == "cpu" else 1]
        known, screen = each * (low if cell.null else high), each * low if KINDS[cell.kind].paired else None
    return replace(cell, estimate_s=round(known, 1), screen_s=None if screen is None else round(screen, 1))


def stage_seconds(cell: PlannedCell, stage: str, compare: ComparePolicy | None) -> float:
    """What is planned for one stage of a cell, whether or not it was expected to come to it."""
    whole, screen = cell.estimate_s or 0.0, cell.screen_s
    if stage == "only" or screen is None or compare is None:
        return whole
    if stage == "screen":
        return screen
    pair = screen / max(compare.screen, 1)
    fewest = min(compare.futility or compare.confirm, compare.confirm)
    # Where most earlier runs stopped after screening, the two medians differ by chance, not by a confirmation.
    return whole - screen if whole - screen > pair * fewest / 2 else pair * compare.confirm


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
    screens: dict[str, list[float]] = {}
    newest = sorted((path for path in runs if is_file(path / "journal")), key=lambda p: p.stat().st_mtime)[-_RUNS:]
    for folder in newest:
        try:
            walls, first = _walls(journal.read(folder / "journal"))
        except (MoegateError, OSError, TypeError, ValueError, OverflowError):
            continue
        for cell, wall in walls.items():
            found.setdefault(cell, []).append(wall)
        for cell in walls.keys() & first.keys():
            screens.setdefault(cell, []).append(first[cell])
    return History(_medians(found), _medians(screens))


def _medians(rows: Mapping[str, list[float]]) -> dict[str, float]:
    return {cell: median(values) for cell, values in rows.items()}


def _walls(entries: Iterable[journal.Entry]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the passed attempts of each cell that one run brought to its end, and of their screening alone.

    A screening alone is no cell.
    """
    walls: dict[str, float] = {}
    screens: dict[str, float] = {}
    whole: set[str] = set()
    for entry in entries:
        if entry.data.get("state") != "PASSED":
            continue
        cell = str(entry.data.get("cell"))
        if entry.kind == "done":
            wall = float(entry.data.get("wall_s") or 0.0)
            if not 0 <= wall <= MOST_WALL_S:
                raise ValueError(f"{wall:g} s is no time of an attempt")
            walls[cell] = walls.get(cell, 0.0) + wall
            if entry.data.get("stage") == "screen":
                screens[cell] = screens.get(cell, 0.0) + wall
        elif entry.kind == "final":
            whole.add(cell)
    return {cell: wall for cell, wall in walls.items() if cell in whole}, screens


def duration(seconds: float) -> str:
    """`41s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
