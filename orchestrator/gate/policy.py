"""The gate: a plan, what became of its cells, and their verdicts -> one exit code with every reason for it.

It fails closed. A planned cell passes only for a reason that is written here: a verdict that the policy accepts, or
(without arms) work that was done and passed. A missing result, an unknown state, an unknown verdict never pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from moegate.exits import Exit, rank, worst
from moegate.records import (
    CellOutcome,
    CellVerdict,
    Comparison,
    GatePolicy,
    GateReason,
    GateResult,
    Plan,
    PlannedCell,
    QuarantineRule,
    to_json,
)

STATE_EXITS: Mapping[str, Exit] = {
    "PASSED": Exit.OK,
    "FAILED": Exit.REGRESSION,
    "TIMEOUT": Exit.REGRESSION,
    "OOM": Exit.REGRESSION,
    "CRASHED": Exit.REGRESSION,
    "DEVICE_LOST": Exit.INFRA,
    "INFRA_ERROR": Exit.INFRA,
    "CANCELLED": Exit.INFRA,
    "BLOCKED": Exit.INFRA,
}
"""Exit of a cell that ended so; any other state has not ended: exit 3."""

PASSING: Mapping[str, frozenset[str]] = {
    "improved": frozenset({"improved"}),
    "no_regression": frozenset({"improved", "equivalent"}),
    "equal": frozenset({"equivalent"}),
}
"""Conclusive verdicts that each `expect` accepts."""

_CONCLUSIVE = frozenset({"improved", "regressed", "equivalent"})
_VERDICTS = _CONCLUSIVE | {"inconclusive"}

_TALLY: Mapping[str, tuple[str, ...]] = {
    "improved": ("improved",),
    "regressed": ("regressed",),
    "equivalent": ("equivalent",),
    "inconclusive": ("inconclusive",),
    "control{s} held": ("control_equivalent",),
    "control{s} not shown to move": ("control_inconclusive",),
    "control{s} moved": ("control_improved", "control_regressed"),
    "failed": ("failed", "timeout", "oom", "crashed"),
}
"""The words of the sentence's tally -> the counts that belong to them; then what passed, then what has no answer."""


def gate(
    plan: Plan, outcomes: Iterable[CellOutcome], comparison: Comparison, *, now: datetime | None = None
) -> GateResult:
    """Judge a run. `now` (UTC) decides which quarantines still hold."""
    today = (now or datetime.now(UTC)).date().isoformat()
    states = {outcome.cell: outcome for outcome in outcomes}
    verdicts = {verdict.cell: verdict for verdict in comparison.cells}
    reasons: list[GateReason] = []
    counts: Counter[str] = Counter()
    for cell in plan.cells:
        answers = _judge_cell(cell, states.get(cell.id), verdicts.get(cell.id), plan)
        rule = _quarantine(cell, plan.gate.quarantine, today)
        if rule is not None:
            answers = [_informs(answer, f"quarantined until {rule.until}: {rule.reason}") for answer in answers]
            counts["quarantined"] += 1
        counts.update(_counts(cell, states.get(cell.id), verdicts.get(cell.id)))
        reasons.extend(answers)
    reasons.extend(_run_reasons(plan, comparison, today))
    reasons.sort(key=lambda reason: rank(reason.exit))
    code = worst(reason.exit for reason in reasons)
    return GateResult(
        exit=int(code),
        sentence=_sentence(code, reasons, _tally(counts, _worked(plan, states), len(plan.cells)), len(plan.cells)),
        reasons=tuple(reasons),
        counts=dict(counts),
        policy={"gate": to_json(plan.gate), "compare": to_json(plan.compare)},
    )


def _judge_cell(
    cell: PlannedCell, outcome: CellOutcome | None, verdict: CellVerdict | None, plan: Plan
) -> list[GateReason]:
    """Everything that one cell contributes; empty where it simply passes."""
    if outcome is None:
        return [GateReason(Exit.INFRA, "no outcome: the cell was planned and never ended", cell.id)]
    code = STATE_EXITS.get(outcome.state, Exit.INFRA)
    if code is not Exit.OK:
        why = f": {outcome.reason}" if outcome.reason else ""
        return [GateReason(code, f"{outcome.state}{why}", cell.id)]
    if not cell.arms:
        return []
    if verdict is None or verdict.verdict is None:
        why = verdict.reason if verdict is not None else "it is not in the comparison"
        return [GateReason(Exit.INFRA, f"no verdict: {why}", cell.id)]
    if cell.kind == "accuracy":
        return _judge_accuracy(cell, verdict, plan.gate)
    if cell.null:
        return _judge_control(cell, verdict)
    return _judge_speed(cell, verdict, plan)


def _judge_control(cell: PlannedCell, verdict: CellVerdict) -> list[GateReason]:
    """A control or an A/A cell: nothing changed there, so nothing may move. It is never counted as inconclusive."""
    if verdict.verdict in ("equivalent", "inconclusive"):
        return []
    what = "A/A cell" if cell.aa else "control"
    return [GateReason(Exit.INFRA, f"the {what} came out {verdict.verdict}: its pool cannot be believed", cell.id)]


def _judge_accuracy(cell: PlannedCell, verdict: CellVerdict, policy: GatePolicy) -> list[GateReason]:
    if verdict.verdict in ("improved", "equivalent"):
        return []
    if verdict.verdict == "regressed":
        return [GateReason(Exit.REGRESSION, f"accuracy regressed: {verdict.reason}", cell.id)]
    if verdict.verdict == "inconclusive":
        return [_inconclusive(cell, verdict, policy)]
    return [_unknown(cell, verdict)]


def _judge_speed(cell: PlannedCell, verdict: CellVerdict, plan: Plan) -> list[GateReason]:
    expect = plan.compare.expect if plan.compare is not None else "no_regression"
    if verdict.verdict in PASSING[expect]:
        return []
    if verdict.verdict in _CONCLUSIVE:
        reason = GateReason(Exit.REGRESSION, f"{verdict.verdict}, expected {expect}{_by(verdict)}", cell.id)
    elif verdict.verdict == "inconclusive":
        reason = _inconclusive(cell, verdict, plan.gate)
    else:
        return [_unknown(cell, verdict)]
    tier = _tier(cell, plan.gate)
    return [_informs(reason, "functional tier: speed informs")] if tier == "functional" else [reason]


def _inconclusive(cell: PlannedCell, verdict: CellVerdict, policy: GatePolicy) -> GateReason:
    required = any(cell.matches(glob) for glob in policy.required)
    more = f"; about {verdict.more_pairs} more pairs would settle it" if verdict.more_pairs else ""
    message = f"inconclusive{_by(verdict)}: {verdict.reason}{more}"
    if required:
        return GateReason(Exit.INCONCLUSIVE, f"required, but {message}", cell.id)
    return GateReason(Exit.INCONCLUSIVE if policy.inconclusive == "fail" else Exit.OK, message, cell.id)


def _unknown(cell: PlannedCell, verdict: CellVerdict) -> GateReason:
    return GateReason(Exit.INFRA, f"unknown verdict {verdict.verdict!r}", cell.id)


def _by(verdict: CellVerdict) -> str:
    effect = verdict.effect
    if effect is None:
        return ""
    return (
        f" ({effect.metric} {100 * effect.gain:+.1f} % [{100 * effect.gain_low:+.1f}, {100 * effect.gain_high:+.1f}])"
    )


def _tier(cell: PlannedCell, policy: GatePolicy) -> str:
    """The tier of a cell's pool and backend; a GLOB on either side of the slash is understood."""
    name = f"{cell.pool or ''}/{cell.axes.get('moe_runner_backend', '')}"
    if name in policy.tiers:
        return policy.tiers[name]
    return next((tier for glob, tier in policy.tiers.items() if fnmatchcase(name, glob)), "performance")


def _quarantine(cell: PlannedCell, rules: Iterable[QuarantineRule], today: str) -> QuarantineRule | None:
    """The rule that keeps this cell from gating; `until` is its last day."""
    return next((rule for rule in rules if cell.matches(rule.cells) and today <= rule.until[:10]), None)


def _informs(reason: GateReason, why: str) -> GateReason:
    return GateReason(Exit.OK, f"{reason.message} ({why})", reason.cell)


def _run_reasons(plan: Plan, comparison: Comparison, today: str) -> list[GateReason]:
    """What concerns no single cell."""
    reasons = []
    if not plan.cells:
        reasons.append(GateReason(Exit.INFRA, "the plan has no cells: nothing was measured"))
    planned = {cell.id for cell in plan.cells}
    strangers = sorted({verdict.cell for verdict in comparison.cells} - planned)
    if strangers:
        reasons.append(
            GateReason(Exit.INFRA, f"{len(strangers)} verdicts of cells that were not planned", strangers[0])
        )
    for glob in plan.gate.required:
        if not any(cell.matches(glob) for cell in plan.cells):
            reasons.append(GateReason(Exit.INFRA, f"required cells {glob!r}: no planned cell matches"))
    for pool, why in comparison.voided_pools.items():
        reasons.append(GateReason(Exit.INFRA, f"the verdicts of pool {pool or '(none)'} are void: {why}"))
    for rule in plan.gate.quarantine:
        if today > rule.until[:10]:
            reasons.append(
                GateReason(Exit.OK, f"the quarantine of {rule.cells!r} ended on {rule.until[:10]}: it gates")
            )
    return reasons


def _counts(cell: PlannedCell, outcome: CellOutcome | None, verdict: CellVerdict | None) -> list[str]:
    """Under which headings a cell is counted."""
    state = outcome.state if outcome is not None else "missing"
    names = ["cells", "passed" if state == "PASSED" else state.lower()]
    if cell.arms:
        # What a cell that did not end would have come to is no answer, and is not counted as one.
        ended = state == "PASSED" and verdict is not None and verdict.verdict in _VERDICTS
        word = verdict.verdict if ended and verdict is not None else "no_verdict"
        names.append(f"control_{word}" if cell.null else str(word))
    return names


def _worked(plan: Plan, states: Mapping[str, CellOutcome]) -> int:
    """How many cells without arms did their work."""
    ended = (states[cell.id].state for cell in plan.cells if not cell.arms and cell.id in states)
    return sum(state == "PASSED" for state in ended)


def _tally(counts: Mapping[str, int], worked: int, cells: int) -> str:
    """What became of every cell, in numbers that add up to all of them."""
    found = {words: sum(counts.get(name, 0) for name in names) for words, names in _TALLY.items()}
    found["passed"] = worked
    found["without an answer"] = cells - sum(found.values())
    return ", ".join(f"{n} {words.format(s='s' if n > 1 else '')}" for words, n in found.items() if n > 0)


def _sentence(code: Exit, reasons: list[GateReason], tally: str, cells: int) -> str:
    """The one line that a person reads first."""
    tail = f" ({tally})" if tally else ""
    first = next((reason for reason in reasons if reason.exit == code), None)
    if code is Exit.OK or first is None:
        return f"PASS: {cells} cell{'' if cells == 1 else 's'}{tail}"
    same = len({reason.cell for reason in reasons if reason.exit == code and reason.cell is not None})
    words = {Exit.REGRESSION: "FAIL", Exit.INFRA: "NO ANSWER", Exit.INCONCLUSIVE: "INCONCLUSIVE"}
    scope = f"{same} of {cells} cell{'' if cells == 1 else 's'}" if same else "the run"
    return f"{words.get(code, 'ERROR')}: {scope}: {first.message}{tail}"
