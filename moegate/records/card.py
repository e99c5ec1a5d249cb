"""One run as an index of runs shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RunCard"]


@dataclass(frozen=True)
class RunCard:
    """A run directory at a glance.

    `folder` is its name inside the folder of runs (empty: that folder itself). `exit` is None while there is no
    `gate.json`; `running` says whether an orchestrator is at work on it, `problem` why a directory could not be read;
    `files` are the outputs that can be opened.
    """

    folder: str
    name: str
    matrix: str = ""
    started: str = ""
    cells: int = 0
    exit: int | None = None
    sentence: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    problem: str = ""
    running: bool = False
