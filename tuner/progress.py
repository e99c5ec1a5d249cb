"""Progress on standard error: one line that is rewritten on a terminal, plain lines elsewhere, with an ETA."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from tuner.strategies.base import Outcome, Request, Runner

__all__ = ["Progress", "Watched", "duration"]

_EVERY_S = 15.0


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 04 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """Counts steps of known number; the ETA is the mean time of a step times the steps left."""

    def __init__(self, total: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.total, self.done = total, 0
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._began = time.monotonic()
        self._terminal = self._stream.isatty()

    def step(self, text: str, advance: int = 1) -> None:
        """One step is done; `text` says what came out."""
        self.done += advance
        elapsed = time.monotonic() - self._began
        left = elapsed / self.done * (self.total - self.done) if self.done else 0.0
        self._write(f"[{self.done}/{self.total}, {duration(elapsed)}, about {duration(left)} left] {text}")

    def say(self, text: str) -> None:
        """A line outside the count, which stays as it is."""
        if not self._quiet:
            self._stream.write(f"\r\x1b[2K{text}\n" if self._terminal else text + "\n")
            self._stream.flush()

    def now(self, text: str) -> None:
        """What goes on meanwhile: on a terminal the next line takes its place."""
        self._write(text)

    def end(self) -> None:
        """Leave the last line standing."""
        if self._terminal and not self._quiet:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        self._stream.write(f"\r\x1b[2K{text[: self._room()]}" if self._terminal else text + "\n")
        self._stream.flush()

    def _room(self) -> int:
        """Characters of one line: what is wrapped is not rewritten, and would stay on the screen."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or 80) - 1


class Watched:
    """A runner that tells what it was asked for first, and now and then how far it is: a stage may take minutes."""

    def __init__(self, inner: Runner, progress: Progress, every_s: float = _EVERY_S) -> None:
        self.inner, self._progress, self._every_s = inner, progress, every_s
        self._count, self._told = 0, 0.0

    def submit(self, requests: Sequence[Request]) -> None:
        """Pass on."""
        if requests and not self._told:
            first = requests[0].unit
            self._tell(f"measuring {first.projection} M={first.batch_size} {first.config.spell()}, and others after it")
        self.inner.submit(requests)

    def next(self) -> Outcome:
        """Pass an answer on."""
        outcome = self.inner.next()
        self._count += 1
        if time.monotonic() - self._told >= self._every_s:
            unit = outcome.unit
            found = outcome.error or f"{min(outcome.samples_us, default=0.0):.1f} us"
            self._tell(f"{self._count} answers, the last: {unit.projection} M={unit.batch_size} "
                       f"{unit.config.spell()}: {found}")  # fmt: skip
        return outcome

    def cancel(self) -> None:
        """Pass on."""
        self.inner.cancel()

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        self._progress.now(text)
