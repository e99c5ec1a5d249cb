"""The 2x2: what the arms did where the config lookup is reachable, beside what they did where it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from moegate import canonical
from moegate.records import CellVerdict, Interaction, PlannedCell
from moegate.stats import shift

_AXIS = "moe_runner_backend"


def interactions_of(cells: Sequence[PlannedCell], verdicts: Mapping[str, CellVerdict]) -> tuple[Interaction, ...]:
    """One interaction per group of cells that differ in the backend alone and hold at least two backends."""
    groups: dict[str, list[PlannedCell]] = defaultdict(list)
    for cell in cells:
        if cell.id in verdicts and isinstance(cell.axes.get(_AXIS), str) and not cell.aa:
            rest = {name: value for name, value in cell.axes.items() if name != _AXIS}
            groups[canonical.dumps([cell.kind, cell.pool, cell.model, list(cell.arms), rest])].append(cell)
    return tuple(_interaction(group, verdicts) for group in groups.values() if len(group) > 1)


def _interaction(group: Sequence[PlannedCell], verdicts: Mapping[str, CellVerdict]) -> Interaction:
    first = group[0]
    backends = {str(cell.axes[_AXIS]): cell.id for cell in group}
    label = " ".join(str(part) for part in (first.kind, first.model, first.axes.get("graph"), first.pool) if part)
    reachable = [verdicts[cell.id] for cell in group if not cell.control]
    controls = [verdicts[cell.id] for cell in group if cell.control]
    if len(reachable) != 1 or len(controls) != 1:
        return Interaction(label=label, kind=first.kind, cells=backends)
    here, there = (_pairs(verdict) for verdict in (reachable[0], controls[0]))
    if not here or not there:
        return Interaction(label=label, kind=first.kind, cells=backends)
    estimate, interval = shift(here, there)
    return Interaction(label, first.kind, backends, difference=estimate, low=interval.low, high=interval.high)


def _pairs(verdict: CellVerdict) -> tuple[float, ...]:
    """The pairs that estimate a cell's effect: fresh ones where it was confirmed, as its own interval does."""
    fresh = verdict.log_ratios_confirm
    return fresh if fresh and verdict.verdict in ("improved", "regressed") else verdict.log_ratios_screen + fresh
