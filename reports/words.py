"""The words, arrows and colours for what can happen to a cell: one table, used by every writer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from moegate.exits import Exit
from moegate.records import CellOutcome, CellVerdict, PlannedCell
from moegate.records.comparison import Verdict
from reports.text import one_line

__all__ = [
    "GATES", "LOOKS", "UNDECIDED", "GateLook", "Look", "Outcome", "gate_look", "gate_sentence", "judged", "outcome_of",
]  # fmt: skip

Outcome = Literal[
    "regressed",
    "moved",
    "failed",
    "missing",
    "inconclusive",
    "improved",
    "equivalent",
    "held",
    "unmoved",
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
    "moved": Look("control moved", "!", "bad", 1, "a control or A/A cell that moved: its pool cannot be believed"),
    "failed": Look("failed", "✕", "bad", 1, "the cell ended FAILED, OOM, CRASHED or TIMEOUT"),
    "missing": Look("missing", "∅", "gone", 2, "planned, but without a verdict or a result"),
    "inconclusive": Look("inconclusive", "?", "open", 3, "the interval leaves more than one answer open"),
    "improved": Look("improved", "▲", "good", 4, "better by more than the margin, confirmed on fresh pairs"),
    "equivalent": Look("equivalent", "≈", "same", 5, "shown to lie within the tolerance"),
    "unmoved": Look(
        "not shown to move", "~", "open", 5, "a control or A/A cell proven neither to move nor to stand still"
    ),
    "held": Look("control held", "=", "same", 6, "a control or A/A cell shown to lie within the tolerance"),
    "passed": Look("passed", "✓", "done", 6, "a cell without arms that did its work"),
    "quarantined": Look("quarantined", "‖", "mute", 7, "run, or set aside, by an explicit rule; it does not gate"),
}


@dataclass(frozen=True)
class GateLook:
    """How the answer of the gate is shown: the large word, its arrow, tone, and a short key for filters."""

    word: str
    arrow: str
    tone: str
    key: str


GATES: dict[int, GateLook] = {
    Exit.OK: GateLook("Passes", "✓", "good", "passes"),
    Exit.REGRESSION: GateLook("Fails", "✕", "bad", "fails"),
    Exit.USAGE: GateLook("Cannot judge: an input is wrong", "✕", "bad", "wrong"),
    Exit.INFRA: GateLook("Incomplete", "∅", "gone", "incomplete"),
    Exit.INCONCLUSIVE: GateLook("Undecided", "?", "open", "undecided"),
    Exit.INTERRUPTED: GateLook("Interrupted", "‖", "gone", "interrupted"),
    Exit.TERMINATED: GateLook("Terminated", "‖", "gone", "interrupted"),
}
UNDECIDED = GateLook("Not judged yet", "…", "done", "running")


def gate_look(code: int | None, *, running: bool = True) -> GateLook:
    """Return how an exit code of the gate is shown; None is a run that has not been judged, and may never be."""
    if code is None:
        return UNDECIDED if running else GATES[Exit.INTERRUPTED]
    return GATES.get(code) or GateLook(f"Exit {code}", "?", "open", "other")


_PREFIX = re.compile(r"^(PASS|FAIL|NO ANSWER|INCONCLUSIVE|ERROR): ")


def gate_sentence(sentence: str, limit: int) -> str:
    """Return the gate's sentence without the word that it begins with, where that word stands beside it anyway."""
    return _PREFIX.sub("", one_line(sentence, limit))


# To be within the tolerance has to be shown; not to have been seen to move is less, and what it leaves is the noise.
_CONTROLS: dict[str, Outcome] = {"equivalent": "held", "inconclusive": "unmoved"}
_FAILED_STATES = frozenset({"FAILED", "TIMEOUT", "OOM", "CRASHED"})


def judged(verdict: Verdict, *, null: bool) -> Outcome:
    """The one word for a verdict. null: of a control or an A/A cell, which is to stand still."""
    return _CONTROLS.get(verdict, "moved") if null else verdict


def outcome_of(
    cell: PlannedCell, outcome: CellOutcome | None, verdict: CellVerdict | None, quarantined: bool
) -> Outcome:
    """Return the one word for a cell, from its state, its verdict and whether a rule sets it aside."""
    state = "PLANNED" if outcome is None else outcome.state
    if quarantined:
        return "quarantined"
    if state in _FAILED_STATES:
        return "failed"
    if state == "PASSED" and verdict is not None and verdict.verdict is not None:
        return judged(verdict.verdict, null=cell.null)
    if state == "PASSED" and not cell.arms:
        return "passed"
    return "missing"
