"""The gate's table: every verdict, state and policy, and that it is red whenever something is missing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from moegate.exits import Exit
from moegate.records import (
    CellOutcome,
    CellVerdict,
    ComparePolicy,
    Comparison,
    GatePolicy,
    GateResult,
    Plan,
    PlannedCell,
    QuarantineRule,
    State,
    from_json,
    to_json,
)
from orchestrator.gate import PASSING, STATE_EXITS, gate

NOW = datetime(2026, 6, 15, tzinfo=UTC)
VERDICTS = ("improved", "regressed", "equivalent", "inconclusive")


def make_cell(name: str = "c", **changes: Any) -> PlannedCell:
    base = PlannedCell(
        id=f"id-{name}",
        kind="serve",
        label=f"serve-{name}",
        axes={"moe_runner_backend": "triton"},
        why="",
        timeout_s=1.0,
        arms=("a", "b"),
        pool="gpu",
    )
    return replace(base, **changes)


def make_plan(cells: list[PlannedCell], expect: str = "no_regression", **policy: Any) -> Plan:
    return Plan(
        name="t", matrix="", matrix_digest="", created="", version="", cells=tuple(cells), pools=(), models=(), arms=(),
        images=(), compare=ComparePolicy("a", "b", expect=expect), gate=GatePolicy(**policy),  # type: ignore[arg-type]
    )  # fmt: skip


def make_verdict(cell: PlannedCell, verdict: Any, **changes: Any) -> CellVerdict:
    base = CellVerdict(
        cell=cell.id, label=cell.label, kind=cell.kind, family="serving", verdict=verdict, reason="because",
        control=cell.control, aa=cell.aa,
    )  # fmt: skip
    return replace(base, **changes)


def judge(
    cell: PlannedCell, verdict: Any, expect: str = "no_regression", state: Any = "PASSED", **policy: Any
) -> GateResult:
    comparison = Comparison(cells=(make_verdict(cell, verdict),))
    return gate(make_plan([cell], expect, **policy), [CellOutcome(cell.id, state)], comparison, now=NOW)


@pytest.mark.parametrize(
    ("expect", "verdict", "code"),
    [
        ("improved", "improved", 0),
        ("improved", "equivalent", 1),
        ("improved", "regressed", 1),
        ("improved", "inconclusive", 0),
        ("no_regression", "improved", 0),
        ("no_regression", "equivalent", 0),
        ("no_regression", "regressed", 1),
        ("no_regression", "inconclusive", 0),
        ("equal", "improved", 1),
        ("equal", "equivalent", 0),
        ("equal", "regressed", 1),
        ("equal", "inconclusive", 0),
    ],
)
def test_expect(expect: str, verdict: str, code: int) -> None:
    result = judge(make_cell(), verdict, expect)
    assert result.exit == code
    if code:
        assert expect in result.sentence
        assert result.reasons[0].cell == "id-c"


@pytest.mark.parametrize("expect", sorted(PASSING))
def test_inconclusive_fails_where_required_or_asked(expect: str) -> None:
    cell = make_cell()
    assert judge(cell, "inconclusive", expect, inconclusive="fail").exit == Exit.INCONCLUSIVE
    assert judge(cell, "inconclusive", expect, required=("serve-*",)).exit == Exit.INCONCLUSIVE
    assert judge(cell, "inconclusive", expect, required=("id-c",)).exit == Exit.INCONCLUSIVE
    warned = judge(cell, "inconclusive", expect)
    assert (warned.exit, len(warned.reasons)) == (0, 1)


@pytest.mark.parametrize("kind", [{"control": True}, {"aa": True}])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_controls_may_not_move_and_are_never_inconclusive(kind: dict[str, bool], verdict: str) -> None:
    result = judge(make_cell(**kind), verdict, "improved", inconclusive="fail", required=("*",))
    assert result.exit == (Exit.INFRA if verdict in ("improved", "regressed") else Exit.OK)


@pytest.mark.parametrize("state", get_args(State))
def test_every_state_has_its_exit(state: str) -> None:
    assert judge(make_cell(arms=(), kind="tune"), None, state=state).exit == STATE_EXITS.get(state, Exit.INFRA)
    assert judge(make_cell(), "improved", state=state).exit == STATE_EXITS.get(state, Exit.INFRA)


def test_the_state_exits_are_those_of_the_contract() -> None:
    ones = {state for state, code in STATE_EXITS.items() if code == 1}
    assert ones == {"FAILED", "OOM", "CRASHED", "TIMEOUT"}
    assert {state for state, code in STATE_EXITS.items() if code == 0} == {"PASSED"}


def green(count: int = 4) -> tuple[Plan, list[CellOutcome], Comparison]:
    """A run that passes, with a cell of every sort."""
    cells = [
        make_cell("speed"),
        make_cell("tune", kind="tune", arms=()),
        make_cell("acc", kind="accuracy"),
        make_cell("auto", control=True),
        make_cell("aa", aa=True),
    ][: count + 1]
    outcomes = [CellOutcome(cell.id, "PASSED") for cell in cells]
    verdicts = tuple(make_verdict(cell, "equivalent") for cell in cells if cell.arms)
    return make_plan(cells), outcomes, Comparison(cells=verdicts)


def test_the_green_run_is_green() -> None:
    plan, outcomes, comparison = green()
    result = gate(plan, outcomes, comparison, now=NOW)
    assert result.exit == 0
    assert result.sentence == "PASS: 5 cells (2 equivalent, 2 controls held, 1 passed)"
    assert from_json(GateResult, to_json(result)) == result


def test_what_an_unfinished_cell_would_have_come_to_is_not_counted() -> None:
    plan, outcomes, comparison = green()
    outcomes[0] = CellOutcome(outcomes[0].cell, "CANCELLED", reason="stopped on request")
    result = gate(plan, outcomes, comparison, now=NOW)
    assert result.exit == 3
    tally = "1 equivalent, 2 controls held, 1 passed, 1 without an answer"
    assert result.sentence == f"NO ANSWER: 1 of 5 cells: CANCELLED: stopped on request ({tally})"


def test_a_control_in_the_noise_is_not_said_to_have_held() -> None:
    plan, outcomes, comparison = green()
    noisy = tuple(replace(v, verdict="inconclusive") if v.aa else v for v in comparison.cells)
    result = gate(plan, outcomes, replace(comparison, cells=noisy), now=NOW)
    assert result.exit == 0
    assert result.sentence == "PASS: 5 cells (2 equivalent, 1 control held, 1 control not shown to move, 1 passed)"
    moved = tuple(replace(v, verdict="regressed") if v.aa else v for v in comparison.cells)
    outcomes[1] = replace(outcomes[1], state="OOM")
    result = gate(plan, outcomes, replace(comparison, cells=moved), now=NOW)
    assert result.sentence.endswith("(2 equivalent, 1 control held, 1 control moved, 1 failed)")


def mutants() -> list[Any]:
    plan, outcomes, comparison = green()
    found = []
    for i, outcome in enumerate(outcomes):
        found.append(pytest.param(plan, outcomes[:i] + outcomes[i + 1 :], comparison, id=f"no outcome {outcome.cell}"))
        for state in ("PLANNED", "RUNNING", "LOST", "passed", ""):
            changed = [*outcomes[:i], replace(outcome, state=state), *outcomes[i + 1 :]]  # type: ignore[arg-type]
            found.append(pytest.param(plan, changed, comparison, id=f"state {state!r} {outcome.cell}"))
    for i, verdict in enumerate(comparison.cells):
        rest = comparison.cells[:i] + comparison.cells[i + 1 :]
        found.append(pytest.param(plan, outcomes, replace(comparison, cells=rest), id=f"no verdict {verdict.cell}"))
        for word in (None, "", "EQUIVALENT", "ok", "better", True):
            cells = (*comparison.cells[:i], replace(verdict, verdict=word), *comparison.cells[i + 1 :])  # type: ignore[arg-type]
            found.append(pytest.param(plan, outcomes, replace(comparison, cells=cells), id=f"{word!r} {verdict.cell}"))
        stranger = replace(verdict, cell="id-unplanned")
        cells = (*comparison.cells[:i], stranger, *comparison.cells[i + 1 :])
        found.append(pytest.param(plan, outcomes, replace(comparison, cells=cells), id=f"renamed {verdict.cell}"))
    found.append(pytest.param(plan, [], Comparison(cells=()), id="empty run"))
    found.append(pytest.param(replace(plan, cells=()), [], Comparison(cells=()), id="empty plan"))
    found.append(pytest.param(replace(plan, cells=()), outcomes, comparison, id="plan lost its cells"))
    voided = replace(comparison, voided_pools={"gpu": "control moved"})
    found.append(pytest.param(plan, outcomes, voided, id="voided pool"))
    nothing = replace(plan, gate=replace(plan.gate, required=("no-such-*",)))
    found.append(pytest.param(nothing, outcomes, comparison, id="required matches nothing"))
    return found


@pytest.mark.parametrize(("plan", "outcomes", "comparison"), mutants())
def test_the_gate_is_red_on_every_missing_or_unknown_answer(plan: Plan, outcomes: Any, comparison: Comparison) -> None:
    for expect, policy in itertools.product(PASSING, ("warn", "fail")):
        lenient = replace(
            plan, gate=replace(plan.gate, inconclusive=policy), compare=replace(plan.compare, expect=expect)
        )
        result = gate(lenient, outcomes, comparison, now=NOW)
        assert result.exit != 0
        assert result.sentence.split(":")[0] in ("NO ANSWER", "FAIL")


def test_precedence_a_regression_outranks_missing_cells_and_those_outrank_inconclusive() -> None:
    cells = [make_cell("slow"), make_cell("lost"), make_cell("loud")]
    verdicts = (
        make_verdict(cells[0], "regressed"),
        make_verdict(cells[1], None),
        make_verdict(cells[2], "inconclusive"),
    )
    outcomes = [CellOutcome(cell.id, "PASSED") for cell in cells]
    for used, code in ((slice(0, 3), 1), (slice(1, 3), 3), (slice(2, 3), 4)):
        plan = make_plan(cells[used], inconclusive="fail")
        result = gate(plan, outcomes[used], Comparison(cells=verdicts[used]), now=NOW)
        assert result.exit == code
        assert result.reasons[0].exit == code


def test_accuracy_gates_on_non_inferiority_alone() -> None:
    cell = make_cell(kind="accuracy")
    for verdict, code in (("improved", 0), ("equivalent", 0), ("regressed", 1), ("inconclusive", 0)):
        assert judge(cell, verdict, "improved").exit == code
    assert judge(cell, "inconclusive", inconclusive="fail").exit == 4


def test_functional_tier_informs() -> None:
    tiers = {"gpu/triton": "functional"}
    assert judge(make_cell(), "regressed", tiers=tiers).exit == 0
    assert judge(make_cell(), "regressed", tiers={"gpu/*": "functional"}).exit == 0
    assert judge(make_cell(), "regressed", tiers=tiers | {"gpu/*": "performance"}).exit == 0
    assert judge(make_cell(), "regressed", tiers={"other/triton": "functional"}).exit == 1
    assert judge(make_cell(), "regressed", tiers=tiers, state="CRASHED").exit == 1
    assert judge(make_cell(), None, tiers=tiers).exit == 3
    assert judge(make_cell(kind="accuracy"), "regressed", tiers=tiers).exit == 1


def test_quarantine_holds_until_its_day() -> None:
    def rule(until: str, cells: str = "serve-*") -> tuple[QuarantineRule, ...]:
        return (QuarantineRule(cells=cells, reason="noisy fan", until=until),)

    held = judge(make_cell(), "regressed", quarantine=rule("2026-06-15"))
    assert held.exit == 0
    assert "noisy fan" in held.reasons[0].message
    assert held.counts["quarantined"] == 1
    assert judge(make_cell(), None, state="CRASHED", quarantine=rule("2026-06-15")).exit == 0
    expired = judge(make_cell(), "regressed", quarantine=rule("2026-06-14"))
    assert expired.exit == 1
    assert any("ended on 2026-06-14" in reason.message for reason in expired.reasons)
    assert judge(make_cell(), "regressed", quarantine=rule("2026-06-15", "kernel-*")).exit == 1


def test_counts_and_sentence_name_what_happened() -> None:
    result = judge(make_cell(), "regressed")
    assert result.counts == {"cells": 1, "passed": 1, "regressed": 1}
    assert result.sentence == "FAIL: 1 of 1 cell: regressed, expected no_regression (1 regressed)"
    assert judge(make_cell(), None).counts["no_verdict"] == 1
