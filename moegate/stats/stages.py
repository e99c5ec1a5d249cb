"""The two-stage test of a cell: few pairs for all cells, fresh pairs only for those that moved.

Log ratios are signed so that positive is better. Screening picks candidates and a direction, and its pairs are never
used again to prove that direction: confirmation pairs are fresh, so the p-values of a family are honest whatever the
screen did. The futility stop only ever gives up, which can cost power but not raise a false alarm. A stage cut short by
the run's budget is judged on the pairs it has: the clock stopped it, not what it saw.

The scheduler asks `next_stage` after each pair; comparison asks `decide` once, from the records. Both end in the same
functions, and so does the self test of the gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moegate.errors import RecordError
from moegate.records import Plan
from moegate.records.plan import LEAST_Q, MOST_PAIRS
from moegate.stats.families import adjusted_p
from moegate.stats.signedrank import FloatArray, as_rows, equivalence_p, hodges_lehmann, one_sided_p

Verdict = Literal["improved", "regressed", "equivalent", "inconclusive"]
Stage = Literal["screen", "confirm", "done"]
Direction = NDArray[np.int8]

EQUIVALENCE_ALPHA = 0.05

MOST_CHANGE = 100.0
"""Of a margin or a tolerance, as a fraction: a matrix allows less than 1."""


@dataclass(frozen=True)
class Rules:
    """The numbers of the two-stage test. Fractions: margin 0.01 is 1 %.

    screen, confirm: pairs per stage. futility: confirmation pairs after which a hopeless cell stops (None: never).
    margin: the smallest change worth a verdict. tolerance: the largest change called equivalent.
    q: false discovery rate of a family.
    """

    screen: int = 5
    confirm: int = 60
    futility: int | None = 10
    margin: float = 0.01
    q: float = 0.01
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if self.screen < 1 or self.confirm < 0 or (self.futility is not None and self.futility < 1):
            raise ValueError("screen and futility need at least 1 pair, confirm at least 0")
        if max(self.screen, self.confirm, self.futility or 0) > MOST_PAIRS:
            raise ValueError(f"screen, confirm and futility are at most {MOST_PAIRS} pairs")
        if not 0 <= self.margin < MOST_CHANGE or not 0 < self.tolerance < MOST_CHANGE or not LEAST_Q <= self.q < 1:
            raise ValueError(
                f"0 <= margin < {MOST_CHANGE:g}, 0 < tolerance < {MOST_CHANGE:g} and {LEAST_Q:g} <= q < 1 are needed"
            )

    @property
    def log_margin(self) -> float:
        """ln(1 + margin): a change by this much in either direction is on the margin."""
        return math.log1p(self.margin)

    @property
    def log_tolerance(self) -> float:
        """ln(1 + tolerance)."""
        return math.log1p(self.tolerance)


def rules_of(plan: Plan) -> Rules:
    """The numbers of the two-stage test that a plan asks for. RecordError where they cannot be."""
    policy, gate = plan.compare, plan.gate
    try:
        if policy is None:
            return Rules(margin=gate.margin, q=gate.q, tolerance=gate.tolerance)
        return Rules(policy.screen, policy.confirm, policy.futility, gate.margin, gate.q, gate.tolerance)
    except ValueError as error:  # a matrix cannot say so; a plan that somebody sent can
        raise RecordError(f"the plan's policy cannot be: {error}") from None


@dataclass(frozen=True)
class Next:
    """What a cell needs now.

    stage: "screen" or "confirm" (run one more pair of it) or "done". direction: what the screen chose (+1 better, -1
    worse, 0 not moved or not known yet). remaining: the most further pairs that this stage may take. reason: one line.
    """

    stage: Stage
    direction: int
    remaining: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """The verdict of one cell within its family.

    p: one-sided p-value of the confirmation pairs against the margin; None where the screen did not choose the cell.
    threshold: the largest p that its family accepts. stopped: the confirmation ended by futility.
    complete: no planned pair is missing. pairs: valid pairs used.
    """

    verdict: Verdict
    reason: str
    direction: int
    p: float | None
    threshold: float | None
    equivalence_p: float
    stopped: bool
    complete: bool
    pairs: int


@dataclass(frozen=True)
class CellPairs:
    """The valid pairs of one cell: log ratios, positive is better."""

    screen: Sequence[float]
    confirm: Sequence[float] = ()


def screen_decision(log_ratios: ArrayLike, margin: float) -> Direction:
    """Which cells moved: the sign of a median at least `margin` (log ratio) in size, else 0. ``[..., n] -> [...]``."""
    median = np.median(as_rows(log_ratios), axis=-1)
    return np.where(np.abs(median) >= margin, np.sign(median), 0.0).astype(np.int8)


def confirm_decision(fresh: ArrayLike, direction: ArrayLike, margin: float) -> FloatArray:
    """One-sided p-values of fresh pairs against `margin`, in the screen's direction. ``[..., n] -> [...]``."""
    return one_sided_p(fresh, margin, direction)


def futile(fresh: ArrayLike, direction: ArrayLike, margin: float) -> NDArray[np.bool_]:
    """Whether going on is hopeless: the fresh pairs' estimate does not reach the margin. ``[..., n] -> [...]``."""
    return np.asarray(hodges_lehmann(fresh) * np.asarray(direction, dtype=np.float64) < margin)


def cells_to_confirm(screens: Mapping[str, Sequence[float]], rules: Rules) -> dict[str, int]:
    """The cells whose finished screen asks for confirmation, with the direction; cells in the order given.

    A cell with fewer than `rules.screen` pairs is not ready and is left out.
    """
    ready = [cell for cell, pairs in screens.items() if len(pairs) >= rules.screen]
    chosen = {cell: next_stage(screens[cell], (), rules) for cell in ready}
    return {cell: answer.direction for cell, answer in chosen.items() if answer.stage == "confirm"}


def next_stage(screen: Sequence[float], confirm: Sequence[float], rules: Rules) -> Next:
    """What one cell needs next, from its valid pairs so far (void pairs are not passed in, so they are run again)."""
    if len(screen) < rules.screen:
        return Next("screen", 0, rules.screen - len(screen), f"{len(screen)} of {rules.screen} screening pairs")
    direction = int(screen_decision(screen[: rules.screen], rules.log_margin))
    if direction == 0:
        return Next("done", 0, 0, "the screen did not reach the margin")
    if len(confirm) >= rules.confirm:
        return Next("done", direction, 0, f"all {rules.confirm} confirmation pairs are there")
    if _stopped(confirm, direction, rules):
        return Next("done", direction, 0, f"futility: {rules.futility} fresh pairs do not reach the margin")
    return Next("confirm", direction, rules.confirm - len(confirm), f"{len(confirm)} of {rules.confirm} fresh pairs")


def _stopped(confirm: Sequence[float], direction: int, rules: Rules) -> bool:
    """One look, at exactly `futility` pairs: later pairs cannot un-stop what the record shows as stopped."""
    look = rules.futility
    return look is not None and look <= len(confirm) and bool(futile(confirm[:look], direction, rules.log_margin))


def decide(cells: Sequence[CellPairs], rules: Rules) -> list[Decision]:
    """Verdicts of one family, in the order of `cells`. Pairs beyond the planned number are not used.

    Raises ValueError for a cell without a single screening pair.
    """
    count = len(cells)
    screens = [cell.screen[: rules.screen] for cell in cells]
    fresh = [cell.confirm[: rules.confirm] for cell in cells]
    if not all(screens):
        raise ValueError("a cell without screening pairs has no verdict")
    direction, p, tost = np.zeros(count, dtype=np.int8), np.full(count, np.nan), np.full(count, np.nan)
    stopped = np.zeros(count, dtype=bool)
    for indices, rows in _groups(screens):
        if rows.shape[-1] == rules.screen:  # an unfinished screen has chosen nothing yet
            direction[indices] = screen_decision(rows, rules.log_margin)
    for indices, rows in _groups([fresh[i] if direction[i] else () for i in range(count)]):
        p[indices] = confirm_decision(rows, direction[indices], rules.log_margin)
        if rules.futility is not None and rows.shape[-1] >= rules.futility:
            stopped[indices] = futile(rows[..., : rules.futility], direction[indices], rules.log_margin)
    for indices, rows in _groups([(*screens[i], *fresh[i]) for i in range(count)]):
        tost[indices] = equivalence_p(rows, rules.log_tolerance)
    p[(direction != 0) & (stopped | np.isnan(p))] = 1.0  # gave up, or has no fresh pair: in the family, never rejected
    screened = np.flatnonzero(direction)
    rejected = np.zeros(count, dtype=bool)
    rejected[screened] = adjusted_p(p[screened]) <= rules.q
    threshold = rules.q * max(int(rejected.sum()), 1) / max(screened.size, 1)
    return [
        _decision(
            len(screens[i]),
            len(fresh[i]),
            int(direction[i]),
            float(p[i]),
            float(tost[i]),
            rejected=bool(rejected[i]),
            stopped=bool(stopped[i]),
            threshold=threshold,
            rules=rules,
        )
        for i in range(count)
    ]


def _groups(rows: Sequence[Sequence[float]]) -> list[tuple[NDArray[np.intp], FloatArray]]:
    """Rows of equal length together: [(indices, array [cells, n])], empty rows left out."""
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if len(row):
            by_length.setdefault(len(row), []).append(index)
    return [(np.array(ids, dtype=np.intp), np.array([rows[i] for i in ids], np.float64)) for ids in by_length.values()]


def _decision(
    screen: int,
    confirm: int,
    direction: int,
    p: float,
    tost: float,
    *,
    rejected: bool,
    stopped: bool,
    threshold: float,
    rules: Rules,
) -> Decision:
    verdict, reason = _name(direction, p, tost, threshold, rejected=rejected, stopped=stopped)
    complete = screen == rules.screen and (direction == 0 or stopped or confirm == rules.confirm)
    if not complete:
        planned = f"{rules.screen} + {rules.confirm if screen == rules.screen else 0}"
        reason = f"{reason}; {screen} + {confirm} of {planned} pairs"
    return Decision(
        verdict=verdict,
        reason=reason,
        direction=direction,
        p=p if direction else None,
        threshold=threshold if direction else None,
        equivalence_p=tost,
        stopped=stopped,
        complete=complete,
        pairs=screen + confirm,
    )


def _name(
    direction: int, p: float, tost: float, threshold: float, *, rejected: bool, stopped: bool
) -> tuple[Verdict, str]:
    if rejected:
        return ("improved" if direction > 0 else "regressed"), f"p {p:.2g} against the margin (limit {threshold:.2g})"
    if tost <= EQUIVALENCE_ALPHA:
        return "equivalent", f"within the tolerance (p {tost:.2g})"
    if stopped:
        return "inconclusive", "confirmation gave up early: the change is not worth the margin"
    if direction:
        return "inconclusive", f"p {p:.2g} does not reach {threshold:.2g}"
    return "inconclusive", f"the screen did not move, and equivalence is not shown (p {tost:.2g})"
