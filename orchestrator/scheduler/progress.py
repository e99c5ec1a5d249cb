"""What a person sees while a run goes on: one line per event, and on a terminal a status line with the time left."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TextIO

from moegate.records import Launch, Plan, PlannedCell, State
from moegate.stats import roles, samples_of, value_of
from moegate.text import plain
from orchestrator.plan.estimate import duration, run_seconds, stage_seconds
from orchestrator.pools.slots import Slot
from orchestrator.scheduler.job import AttemptDone

__all__ = ["Progress", "Remaining", "duration", "pair_line"]

_BAR = 30
_TOLD_S = 5.0  # finished cells that were planned to take less say nothing about those of another kind
_SLOWEST, _FASTEST = 10.0, 0.1


class Remaining:
    """The time that a run still takes: what is planned, corrected by what finished stages took.

    The pace of a kind is what its first stages took against what was planned for them: a confirmation may give up
    after a few pairs, and then tells nothing about one that does not. Kinds err apart (a table knows neither the model
    nor the host), so a kind is corrected by its own cells. One of which none has finished is taken as planned, or as
    slower than that where all others are. A cell that confirms is corrected by its own screening, and is not expected
    to give up: too long an estimate disappoints nobody.
    """

    def __init__(self, plan: Plan) -> None:
        self._cells = {cell.id: cell for cell in plan.cells}
        self._pools, self._compare = plan.pools, plan.compare
        self._owed: dict[str, str] = {}
        self._screened: dict[str, float] = {}
        self._took: dict[str, float] = defaultdict(float)
        self._planned: dict[str, float] = defaultdict(float)

    def owes(self, cell: PlannedCell, stage: str) -> None:
        """The cell is to do this stage next."""
        self._owed[cell.id] = stage

    def screened(self, cell: PlannedCell, seconds: float) -> None:
        """The cell's screening took so long, now or in an earlier session."""
        self._screened[cell.id] = seconds

    def passed(self, cell: PlannedCell, stage: str, seconds: float) -> None:
        """A stage is over and its result holds; one that does not says nothing about the time that others take."""
        if stage == "screen":
            self.screened(cell, seconds)
        if stage != "confirm" and (stage == "only" or cell.screen_s is not None):
            self._took[cell.kind] += seconds
            self._planned[cell.kind] += stage_seconds(cell, stage, self._compare)

    def drop(self, cell: PlannedCell) -> None:
        """The cell is over."""
        self._cells.pop(cell.id, None)

    def seconds(self) -> float:
        """Until all that is left is through."""
        return run_seconds(((cell.pool, self._due(cell)) for cell in self._cells.values()), self._pools)

    def _due(self, cell: PlannedCell) -> float:
        """What a cell that is not over still takes: all of it, until it is known whether it confirms."""
        if self._owed.get(cell.id) != "confirm":
            return (cell.estimate_s or 0.0) * self._pace(cell.kind)
        confirm, screened = stage_seconds(cell, "confirm", self._compare), self._screened.get(cell.id)
        pace = screened / cell.screen_s if screened and cell.screen_s else self._pace(cell.kind)
        return confirm * pace

    def _pace(self, kind: str) -> float:
        planned = self._planned[kind]
        if planned:
            return min(max(self._took[kind] / planned, _FASTEST), _SLOWEST)
        told = sum(self._planned.values())
        return min(max(sum(self._took.values()) / told, 1.0), _SLOWEST) if told >= _TOLD_S else 1.0


def pair_line(found: float | str, launches: Sequence[Launch], arms: tuple[str, str], metric: str | None) -> str:
    """What a pair came to: of which metric, what each arm measured, and the gain; of a void pair why.

    found: ln(candidate/baseline) of the pair, positive is better, or why it is void. arms: (baseline, candidate).
    metric: None is the launches' own primary one.
    """
    both = roles(launches, arms)
    if isinstance(found, str) or isinstance(both, str):
        return f"void: {found}"
    names = arms if arms[0] != arms[1] else (f"{arms[0]} as A", f"{arms[1]} as B")
    measured = [samples for launch in both if (samples := samples_of(launch, metric)) is not None]
    values = [f"{name} {_value(value_of(s))} {s.unit[:20]}".rstrip() for name, s in zip(names, measured, strict=True)]
    return f"{measured[0].metric[:60]} {', '.join(values)}; gain {100 * math.expm1(found):+.1f} %"


def _value(value: float | None) -> str:
    """A measured value with four significant digits, and no power of ten where it is as long as a number."""
    return "?" if value is None else f"{value:.0f}" if 1e4 <= value < 1e9 else f"{value:.4g}"


class Progress:
    """Prints events to standard error. Thread-safe; a broken pipe never ends a run."""

    def __init__(self, plan: Plan, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._mutex = threading.Lock()
        self._began = time.monotonic()
        self._left = Remaining(plan)
        self._compare = plan.compare
        self._total = len(plan.cells)
        self._finished = 0

    def note(self, text: str) -> None:
        """A line of its own."""
        self._print(f"  {text}")

    def begins(self) -> None:
        """What is to be done, once it is known what was finished before."""
        left = self._total - self._finished
        if left:
            self._print(f"  {left} cell{'' if left == 1 else 's'} to do{self._about()}")
        if left and self._compare is not None:
            arms = f"candidate {self._compare.candidate} is than baseline {self._compare.baseline}"
            self._print(f"  gain: how much better {arms} in one pair of launches; + is better, whatever the metric")

    def owes(self, cell: PlannedCell, stage: str) -> None:
        """A cell is to do a stage."""
        self._left.owes(cell, stage)

    def started(self, cell: PlannedCell, stage: str, number: int, slot: Slot, *, again: bool = False) -> None:
        """An attempt has its slot; `again`: its stage was tried before."""
        what = "" if stage == "only" else f" {stage}{self._pairs(cell, stage)}"
        self._print(f"> {cell.label}{what} on {slot.name}{f', again (attempt {number})' if again else ''}")

    def _pairs(self, cell: PlannedCell, stage: str) -> str:
        """How many pairs a stage takes, and of which arms."""
        if self._compare is None or len(cell.arms) < 2:
            return ""
        pairs = self._compare.screen if stage == "screen" else self._compare.confirm
        other = "itself" if cell.arms[0] == cell.arms[1] else cell.arms[1]
        most = "" if stage == "screen" else "at most "
        return f" ({most}{pairs} pair{'' if pairs == 1 else 's'} of {cell.arms[0]} and {other})"

    def step(self, cell: PlannedCell, text: str) -> None:
        """Something inside an attempt, such as a pair."""
        self._print(f"  {cell.label} {text}")

    def ended(self, cell: PlannedCell, stage: str, done: AttemptDone) -> None:
        """An attempt is over; its cell may go on."""
        if done.state == "PASSED":
            self._left.passed(cell, stage, done.wall_s)

    def screened(self, cell: PlannedCell, seconds: float) -> None:
        """A cell that is to confirm was screened before this session."""
        self._left.screened(cell, seconds)

    def kept(self, cell: PlannedCell) -> None:
        """A cell was finished before this session: it counts as done, and says nothing about the pace."""
        self._finished += 1
        self._left.drop(cell)

    def finished(self, cell: PlannedCell, state: State, reason: str) -> None:
        """A cell has its final state."""
        self._finished += 1
        self._left.drop(cell)
        # What compares arms is not "ok" because it was measured: the verdict comes when all cells are there.
        mark = state if state != "PASSED" else "done" if cell.arms else "ok"
        tail = f": {reason}" if reason else ""
        self._print(f"{mark:>4} {cell.label}{tail}  [{self._finished}/{self._total} cells{self._about(' left')}]")

    def _about(self, after: str = "") -> str:
        """The time left and a word behind it; nothing where none is known."""
        left = self._left.seconds()
        return f", about {duration(left)}{after}" if left else ""

    def close(self) -> None:
        """Take the bar away; later lines stand alone."""
        with self._mutex:
            if self._terminal and not self._quiet:
                self._terminal = False
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def _bar(self) -> str:
        done = round(_BAR * self._finished / max(self._total, 1))
        return f"[{'#' * done}{'.' * (_BAR - done)}] {self._finished} of {self._total} cells{self._about(' left')}"

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        with self._mutex:
            try:
                erase, bar = ("\r\x1b[K", self._bar()) if self._terminal else ("", "")
                self._stream.write(f"{erase}[{duration(time.monotonic() - self._began):>6}] {plain(text)}\n{bar}")
                self._stream.flush()
            except (OSError, ValueError):
                self._quiet = True
