"""The logs of an attempt's launches, one after the other in one file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from moegate.masking import mask_file
from moegate.stats import Turn
from orchestrator.pools.isolation import LaunchSpec

__all__ = ["heading", "keep_logs", "mask_logs"]


def heading(log: Path, number: int, turn: Turn | None) -> None:
    """One line in the log before each launch of several, so that a reader knows which one is speaking.

    People count from 1: so do the report and the lines of a run; `number` and the journal count from 0.
    """
    if turn is None:
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"== launch {number + 1}: arm {turn.arm}, pair {turn.pair + 1}, {now} ==\n")


def keep_logs(spec: LaunchSpec, folder: Path) -> None:
    """Add the logs that a launch had for itself (`launch-NNN.stderr.log`) to those of its attempt."""
    for source in (spec.stdout, spec.stderr):
        if source.is_file():
            with (folder / source.name.partition(".")[2]).open("ab") as kept:
                kept.write(source.read_bytes())
            source.unlink()


def mask_logs(folder: Path) -> None:
    """Mask secrets in the logs of an attempt that has ended."""
    for log in folder.glob("*.log"):
        mask_file(log)
