"""What a resume keeps: from a cell's history to the end that it already has, or to the stage that it still owes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moegate.errors import UsageError
from moegate.journal import Journal
from moegate.records import Attempt, PlannedCell, State
from moegate.stats import Rules, next_stage
from orchestrator.cells import KINDS
from orchestrator.cells.tune import OUTPUT
from orchestrator.scheduler.job import Stage
from orchestrator.scheduler.keys import Key, words
from orchestrator.scheduler.rundir import RunDir
from orchestrator.scheduler.state import KEPT, CellHistory

__all__ = ["Ended", "Owed", "RunAgain", "adoptable", "close_cut_off", "standing"]


@dataclass(frozen=True)
class Ended:
    """The cell is finished: nothing runs."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class Owed:
    """A stage has to run. A confirmation goes to the device of its screen, and knows its log ratios and its time."""

    stage: Stage
    device: str | None = None
    screen: tuple[float, ...] = ()
    screen_s: float = 0.0


@dataclass
class RunAgain:
    """The cells that were finished and are yet run again, and why."""

    cells: int = 0
    parts: set[str] = field(default_factory=set)
    results: bool = False
    unknown: bool = False

    def add(self, history: CellHistory, owed: Owed, key: Callable[[], Key] | None) -> None:
        """Count a cell that owes a stage, where its first one was finished. `key`: None while it cannot be known."""
        done = _first_finished(history)
        if owed.stage == "confirm" or done is None:
            return
        self.cells += 1
        if key is None:  # what it needs is run again, and that is counted with its reason
            return
        now, then = key(), history.parts.get(done.number, {})
        if done.key == now.value:
            self.results = True
        elif then:
            self.parts |= {name for name in now.parts.keys() | then.keys() if now.parts.get(name) != then.get(name)}
        else:
            self.unknown = True

    def line(self) -> str:
        """For a person; empty where nothing is run again."""
        if not self.cells:
            return ""
        why = words(self.parts)
        why += ["results (missing or altered)"] if self.results else []
        why += ["something that the journal of an older version does not name"] if self.unknown else []
        what = "1 cell that was done is" if self.cells == 1 else f"{self.cells} cells that were done are"
        return f"{what} run again; changed since: {'; '.join(why) or 'what was tuned for them'}"


def standing(
    cell: PlannedCell,
    history: CellHistory,
    *,
    needs_hold: bool,
    key: Callable[[], Key],
    rundir: RunDir,
    rules: Rules,
) -> Ended | Owed:
    """Where a cell stands.

    needs_hold: every cell that it needs has passed and is kept. key: the key that it would get now, asked for only
    where it can be known.
    """
    paired = KINDS[cell.kind].paired
    first = Owed("screen" if paired else "only")
    if not needs_hold:
        # What it needs runs again, and may write something else: only then can its key be known.
        return first
    final = history.final
    if final is not None and final[0] in KEPT and final[0] != "PASSED":
        return Ended(final[0]) if history.attempts[-1].key == key().value else first
    done = history.finished(first.stage)
    if done is None or done.key != key().value or not _intact(rundir, cell, done):
        return first
    return _confirmation(cell, history, done, rundir, rules) if paired else Ended("PASSED")


def _confirmation(
    cell: PlannedCell, history: CellHistory, screen: Attempt, rundir: RunDir, rules: Rules
) -> Ended | Owed:
    ratios = history.ratios.get(screen.number, ())
    answer = next_stage(ratios, (), rules)
    if answer.stage != "confirm":
        return Ended("PASSED", answer.reason)
    confirm = history.finished("confirm")
    after = confirm is not None and confirm.number > screen.number
    if confirm is not None and after and confirm.key == screen.key and _intact(rundir, cell, confirm):
        return Ended("PASSED")
    return Owed("confirm", screen.device, ratios, screen.wall_s)


def _first_finished(history: CellHistory) -> Attempt | None:
    """The attempt whose key says whether a finished cell, or a finished screening, is kept."""
    if history.final is not None and history.final[0] in KEPT and history.final[0] != "PASSED":
        return history.attempts[-1]
    return history.finished("screen") or history.finished("only")


def _intact(rundir: RunDir, cell: PlannedCell, attempt: Attempt) -> bool:
    """Whether a finished attempt's result is still what the journal says it was."""
    if attempt.result is None or attempt.result_sha256 is None:
        return False
    try:
        rundir.result_file(cell.id, attempt.number, attempt.result, attempt.result_sha256)
    except (UsageError, OSError):
        return False
    return cell.kind != "tune" or rundir.configs(cell.id).is_dir()


def adoptable(cell: PlannedCell, history: CellHistory, *, key: Callable[[], Key], rundir: RunDir) -> Path | None:
    """The launch folder of a tune cell that was cut off, from whose tree the next attempt can go on, or None."""
    if cell.kind != "tune" or not history.attempts:
        return None
    last = history.attempts[-1]
    folder = rundir.attempt(cell.id, last.number) / "launch-000"
    return folder if (folder / OUTPUT).is_dir() and last.key == key().value else None


def close_cut_off(journal: Journal, history: CellHistory) -> None:
    """Write the end of attempts that have none: they ended with the orchestrator that ran them."""
    for index, attempt in enumerate(history.attempts):
        if attempt.state in ("LEASED", "RUNNING"):
            reason = "cut off: the orchestrator ended"
            journal.append("done", cell=history.cell, attempt=attempt.number, stage=attempt.stage,
                           state="CANCELLED", reason=reason)  # fmt: skip
            history.attempts[index] = Attempt(attempt.number, attempt.stage, "CANCELLED", reason, attempt.key)
