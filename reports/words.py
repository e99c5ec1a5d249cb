"""The words, arrows and colours for what can happen to a cell: one table, used by every writer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegate.records import CellOutcome, CellVerdict, PlannedCell

__all__ = ["LOOKS", "Look", "Outcome", "outcome_of"]

Outcome = Literal[
    "regressed",
    "failed",
    "missing",
    "inconclusive",
    "improved",
    "equivalent",
    "passed",
    "quarantined",
]


@dataclass(frozen=True)
class Look:
    """How an outcome is shown. Colour never stands alone: the arrow and the word say the same.

    `tone` is a class of the style sheet; `rank` orders outcomes by how much they need a person (0 first).
    """

    word: str
    arrow: str
    tone: str
    rank: int
    meaning: str


LOOKS: dict[Outcome, Look] = {
    "regressed": Look("regressed", "▼", "bad", 0, "worse than the margin allows, confirmed on fresh pairs"),
    "failed": Look("failed", "✕", "bad", 1, "the cell ended FAILED, OOM, CRASHED or TIMEOUT"),
    "missing": Look("missing", "∅", "gone", 2, "planned, but without a verdict or a result"),
    "inconclusive": Look("inconclusive", "?", "open", 3, "the interval leaves more than one answer open"),
    "improved": Look("improved", "▲", "good", 4, "better by more than the margin, confirmed on fresh pairs"),
    "equivalent": Look("equivalent", "≈", "same", 5, "shown to lie within the tolerance"),
    "passed": Look("passed", "✓", "done", 6, "a cell without arms that did its work"),
    "quarantined": Look("quarantined", "‖", "mute", 7, "run, or set aside, by an explicit rule; it does not gate"),
}

_FAILED_STATES = frozenset({"FAILED", "TIMEOUT", "OOM", "CRASHED"})


def outcome_of(
    cell: PlannedCell, outcome: CellOutcome | None, verdict: CellVerdict | None, quarantined: bool
) -> Outcome:
    """Return the one word for a cell, from its state, its verdict and whether a rule sets it aside."""
    state = "PLANNED" if outcome is None else outcome.state
    if state == "SKIPPED" or quarantined:
        return "quarantined"
    if state in _FAILED_STATES:
        return "failed"
    if verdict is not None and verdict.verdict is not None:
        return verdict.verdict
    if state == "PASSED" and not cell.arms:
        return "passed"
    return "missing"
