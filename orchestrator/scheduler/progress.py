"""What a person sees while a run goes on: one line per event, and on a terminal a status line with the time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from moegate.records import Plan, PlannedCell, State
from moegate.text import plain
from orchestrator.pools.slots import Slot
from orchestrator.scheduler.job import AttemptDone

__all__ = ["Progress", "duration"]


def duration(seconds: float) -> str:
    """`41s`, `3m05s`, `2h07m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


_BAR = 30


class Progress:
    """Prints events to standard error. Thread-safe; a broken pipe never ends a run."""

    def __init__(self, plan: Plan, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._mutex = threading.Lock()
        self._began = time.monotonic()
        self._left = {cell.id: cell.estimate_s or 0.0 for cell in plan.cells}
        self._total = len(plan.cells)
        self._finished = 0
        self._spent = 0.0
        self._expected = 0.0

    def note(self, text: str) -> None:
        """A line of its own."""
        self._print(f"  {text}")

    def started(self, cell: PlannedCell, stage: str, number: int, slot: Slot) -> None:
        """An attempt has its slot."""
        what = "" if stage == "only" else f" {stage}"
        again = f", attempt {number}" if number > 1 else ""
        self._print(f"> {cell.label}{what} on {slot.name}{again}")

    def step(self, cell: PlannedCell, text: str) -> None:
        """Something inside an attempt, such as a pair."""
        self._print(f"  {cell.label} {text}")

    def ended(self, cell: PlannedCell, stage: str, done: AttemptDone) -> None:
        """An attempt is over; its cell may go on."""
        self._spent += done.wall_s

    def kept(self, cell: PlannedCell) -> None:
        """A cell was finished before this session: it counts as done, and says nothing about the pace."""
        self._finished += 1
        self._left.pop(cell.id, None)

    def finished(self, cell: PlannedCell, state: State, reason: str) -> None:
        """A cell has its final state."""
        self._finished += 1
        self._expected += self._left.pop(cell.id, 0.0)
        mark = {"PASSED": "ok"}.get(state, state)
        tail = f": {reason}" if reason and state != "PASSED" else ""
        self._print(f"{mark:>4} {cell.label}{tail}  [{self._finished}/{self._total}{self._eta()}]")

    def _eta(self) -> str:
        """The planned time that is left, corrected by how the finished cells compared with their plan."""
        left = sum(self._left.values())
        if not left:
            return ""
        pace = self._spent / self._expected if self._expected > 5.0 else 1.0
        return f", about {duration(left * min(max(pace, 0.1), 10.0))} left"

    def close(self) -> None:
        """Take the bar away; later lines stand alone."""
        with self._mutex:
            if self._terminal and not self._quiet:
                self._terminal = False
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def _bar(self) -> str:
        done = round(_BAR * self._finished / max(self._total, 1))
        return f"[{'#' * done}{'.' * (_BAR - done)}] {self._finished} of {self._total} cells{self._eta()}"

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
