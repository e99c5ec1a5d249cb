"""What the journal says happened: every cell's attempts and where it stands. A pure function of the entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moegate.errors import RecordError
from moegate.journal import Entry
from moegate.records import FINAL_STATES, Attempt, CellOutcome, Plan, State, from_json, to_json
from moegate.records.plan import MOST_PAIRS
from moegate.records.run import MOST_WALL_S

__all__ = ["KEPT", "CellHistory", "outcomes", "read_cells", "run_id"]

KEPT: frozenset[str] = frozenset({"PASSED", "FAILED", "TIMEOUT", "OOM", "CRASHED"})
"""States that say something about the cell: a resume keeps them while the key holds, and runs the others again."""


@dataclass
class CellHistory:
    """One cell's attempts in order, and its final state where it has one."""

    cell: str
    attempts: list[Attempt] = field(default_factory=list)
    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    final: tuple[State, str] | None = None
    final_seq: int = -1
    places: dict[int, int] = field(default_factory=dict)  # of attempts in their list, by number
    parts: dict[int, dict[str, str]] = field(default_factory=dict)  # short hashes of what their keys are made of
    arms: dict[int, list[str]] = field(default_factory=dict)  # of the launches of each attempt, "" without one

    def finished(self, stage: str) -> Attempt | None:
        """The newest passed attempt of a stage, or None."""
        return next((a for a in reversed(self.attempts) if a.stage == stage and a.state == "PASSED"), None)


def run_id(entries: Iterable[Entry]) -> str | None:
    """The run's id, or None for a journal that never started one."""
    return next((str(entry.data["run"]) for entry in entries if entry.kind == "run" and "run" in entry.data), None)


def read_cells(entries: Iterable[Entry]) -> dict[str, CellHistory]:
    """Fold the journal into one history per cell. An attempt without an end was cut off with its orchestrator.

    Raises:
        RecordError: an entry whose sum is right and that yet says something no orchestrator writes.
    """
    cells: dict[str, CellHistory] = {}
    for entry in entries:
        try:
            _fold(cells, entry)
        except (LookupError, TypeError, ValueError, OverflowError, RecordError) as error:
            what = f"{type(error).__name__}: {error}" if not isinstance(error, RecordError) else str(error)
            raise RecordError(f"journal entry {entry.seq} ({entry.kind}) cannot be believed: {what}") from None
    return cells


def _fold(cells: dict[str, CellHistory], entry: Entry) -> None:
    data = entry.data
    if entry.kind == "lease":
        history = cells.setdefault(data["cell"], CellHistory(data["cell"]))
        attempt = _leased(data, entry.time)
        history.places.setdefault(attempt.number, len(history.attempts))
        history.attempts.append(attempt)
        history.parts[attempt.number] = {str(name): str(part) for name, part in dict(data.get("parts") or {}).items()}
        history.final = None
    elif entry.kind == "launch":
        history = cells[data["cell"]]
        attempt = history.attempts[-1]
        history.attempts[-1] = replace(attempt, state="RUNNING")
        history.arms.setdefault(attempt.number, []).append(str(data.get("arm") or ""))
    elif entry.kind == "done":
        history = cells[data["cell"]]
        at = history.places.get(data["attempt"])
        if at is not None:
            history.attempts[at] = _ended(history.attempts[at], data)
            ratios = data.get("ratios") or ()
            if len(ratios) > MOST_PAIRS:
                raise RecordError(f"an attempt cannot have made {len(ratios):,} pairs")
            history.ratios[data["attempt"]] = tuple(float(ratio) for ratio in ratios)
    elif entry.kind == "final":
        history = cells.setdefault(data["cell"], CellHistory(data["cell"]))
        end = from_json(CellOutcome, {"cell": data["cell"], "state": data["state"], "reason": data.get("reason", "")})
        history.final, history.final_seq = (end.state, end.reason), entry.seq


def outcomes(
    plan: Plan, cells: Mapping[str, CellHistory], tails: Mapping[str, str] | None = None
) -> tuple[CellOutcome, ...]:
    """One outcome per planned cell, in plan order. A cell without an end is PLANNED, or RUNNING where it has begun."""
    out = []
    for cell in plan.cells:
        history = cells.get(cell.id) or CellHistory(cell.id)
        state, reason = history.final or _unfinished(history)
        out.append(CellOutcome(cell.id, state, reason, tuple(history.attempts), (tails or {}).get(cell.id, "")))
    return tuple(out)


def _unfinished(history: CellHistory) -> tuple[State, str]:
    last = history.attempts[-1] if history.attempts else None
    if last is None:
        return "PLANNED", ""
    if last.state in FINAL_STATES:
        return "PLANNED", f"attempt {last.number} ended {last.state}; the cell is not decided yet"
    return last.state, ""


def _leased(data: Mapping[str, Any], time: str) -> Attempt:
    said = {name: data[name] for name in ("stage", "key", "device", "slot", "isolation") if name in data}
    return from_json(Attempt, {**said, "number": data["attempt"], "state": "LEASED", "started": time})


def _ended(attempt: Attempt, data: Mapping[str, Any]) -> Attempt:
    said = {name: data[name] for name in ("reason", "wall_s", "result", "commands") if name in data}
    if not 0 <= said.get("wall_s", 0.0) <= MOST_WALL_S:
        raise RecordError(f"an attempt cannot have taken {said['wall_s']:g} s")
    return from_json(Attempt, {**to_json(attempt), **said, "state": data["state"], "result_sha256": data.get("sha256")})
