"""The two-stage test: screening, fresh pairs, futility, families."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegate.errors import RecordError
from moegate.records import ComparePolicy, GatePolicy, Plan
from moegate.records.plan import LEAST_Q, MOST_PAIRS
from moegate.stats import (
    CellPairs,
    Rules,
    cells_to_confirm,
    decide,
    minimum_detectable_effect,
    more_pairs,
    next_stage,
    one_sided_p,
    pair_sd,
    rules_of,
    screen_decision,
)

RULES = Rules()
PLAN = Plan("n", "m", "", "", "", (), (), (), (), (), compare=ComparePolicy("a", "b"), gate=GatePolicy())
STILL = [0.001, -0.001, 0.0005, -0.0005, 0.0002]
SLOW = [-0.03, -0.029, -0.031, -0.0305, -0.0295]


@pytest.mark.parametrize(
    "policy",
    [{"margin": -1.0}, {"q": 1.0}, {"q": 1e-230}, {"tolerance": 0.0}, {"screen": 0}, {"screen": 10**40}],
)
def test_a_plan_whose_policy_cannot_be_is_refused(policy: dict[str, float]) -> None:
    gate = GatePolicy(**{name: value for name, value in policy.items() if name != "screen"})
    compare = ComparePolicy("a", "b", screen=int(policy.get("screen", 5)))
    for plan in (replace(PLAN, gate=gate, compare=compare), replace(PLAN, gate=gate, compare=None)):
        if plan.compare is None and "screen" in policy:
            continue
        with pytest.raises(RecordError, match="policy cannot be"):
            rules_of(plan)


def wobble(center: float, n: int) -> list[float]:
    return [center + 0.001 * np.sin(i + 1) for i in range(n)]


def test_screen_is_two_sided_and_needs_the_margin() -> None:
    rows = [[0.02] * 5, [-0.02] * 5, [0.0099] * 5, [0.5, 0.5, 0.0, 0.0, 0.0]]
    assert screen_decision(rows, RULES.log_margin).tolist() == [1, -1, 0, 0]


def test_cells_to_confirm_names_only_those_that_moved_and_are_ready() -> None:
    screens = {"still": STILL, "slow": SLOW, "fast": wobble(0.05, 5), "early": SLOW[:4]}
    assert cells_to_confirm(screens, RULES) == {"slow": -1, "fast": 1}


def test_next_stage_walks_a_cell_through() -> None:
    assert next_stage((), (), RULES).remaining == 5
    assert next_stage(STILL[:3], (), RULES).stage == "screen"
    assert next_stage(STILL, (), RULES).stage == "done"
    first = next_stage(SLOW, (), RULES)
    assert (first.stage, first.direction, first.remaining) == ("confirm", -1, 60)
    assert next_stage(SLOW, wobble(0.0, 9), RULES).stage == "confirm"
    stopped = next_stage(SLOW, wobble(0.0, 10), RULES)
    assert stopped.stage == "done"
    assert "futility" in stopped.reason
    assert next_stage(SLOW, wobble(-0.03, 10), RULES).remaining == 50
    assert next_stage(SLOW, wobble(-0.03, 60), RULES).stage == "done"
    assert next_stage(SLOW, wobble(0.0, 10), Rules(futility=None)).stage == "confirm"


def test_four_verdicts() -> None:
    cells = [
        CellPairs(SLOW, wobble(-0.03, 60)),
        CellPairs(wobble(0.05, 5), wobble(0.05, 60)),
        CellPairs(STILL),
        CellPairs([0.03, -0.03, 0.005, -0.02, 0.02]),
    ]
    decisions = decide(cells, RULES)
    assert [d.verdict for d in decisions] == ["regressed", "improved", "equivalent", "inconclusive"]
    assert all(d.complete for d in decisions)
    assert decisions[0].p == 2.0**-60
    assert decisions[2].p is None


def test_screening_pairs_never_prove_a_direction() -> None:
    decision = decide([CellPairs([-0.2] * 5)], RULES)[0]
    assert decision.verdict == "inconclusive"
    assert decision.p == 1.0
    assert not decision.complete


def test_fresh_pairs_in_the_other_direction_prove_nothing() -> None:
    assert decide([CellPairs(SLOW, wobble(+0.05, 60))], Rules(futility=None))[0].verdict == "inconclusive"


def test_a_futile_cell_stays_stopped_whatever_came_later() -> None:
    confirm = wobble(0.0, 10) + wobble(-0.05, 50)
    decision = decide([CellPairs(SLOW, confirm)], RULES)[0]
    assert (decision.verdict, decision.stopped, decision.p) == ("inconclusive", True, 1.0)


def test_pairs_beyond_the_plan_are_not_used() -> None:
    rules = Rules(confirm=6, futility=None)
    assert decide([CellPairs(SLOW, wobble(-0.03, 60))], rules)[0].p == 2.0**-6


def test_an_unfinished_screen_has_no_direction() -> None:
    decision = decide([CellPairs(SLOW[:4])], RULES)[0]
    assert (decision.direction, decision.complete, decision.verdict) == (0, False, "inconclusive")
    assert "4 + 0 of 5 + 0" in decision.reason


def test_a_stage_ended_by_the_budget_is_judged_on_what_it_has() -> None:
    decision = decide([CellPairs(SLOW, wobble(-0.03, 40))], RULES)[0]
    assert (decision.verdict, decision.complete) == ("regressed", False)


def test_small_default_matrix_can_reach_its_verdict() -> None:
    rules = Rules(screen=3, confirm=8, futility=None)
    cells = [CellPairs([0.9, 0.95, 1.0], wobble(0.9, 8)), CellPairs([0.001, -0.02, 0.03])]
    decisions = decide(cells, rules)
    assert [d.verdict for d in decisions] == ["improved", "inconclusive"]
    assert decisions[0].threshold == pytest.approx(0.01)


def test_the_family_makes_one_lucky_cell_pay() -> None:
    lucky = CellPairs(SLOW, wobble(-0.03, 7))
    rules = Rules(confirm=7, futility=None)
    assert decide([lucky], rules)[0].verdict == "regressed"
    crowd = [lucky, *[CellPairs(SLOW, wobble(0.0, 7))] * 9]
    assert decide(crowd, rules)[0].verdict == "inconclusive"


def test_vectorised_equals_one_by_one_up_to_the_family() -> None:
    rng = np.random.default_rng(2)
    cells = [CellPairs(list(rng.normal(0, 0.03, 5)), list(rng.normal(0.02, 0.03, n))) for n in (60, 0, 10, 60, 3)]
    for together, alone in zip(decide(cells, RULES), [decide([c], RULES)[0] for c in cells], strict=True):
        assert (together.p, together.direction, together.stopped) == (alone.p, alone.direction, alone.stopped)


def test_no_pairs_no_verdict() -> None:
    assert decide([], RULES) == []
    with pytest.raises(ValueError, match="without screening pairs"):
        decide([CellPairs([])], RULES)


@pytest.mark.parametrize(
    "bad",
    [
        {"screen": 0}, {"confirm": -1}, {"futility": 0}, {"margin": -0.1}, {"q": 0.0}, {"q": 1.0}, {"q": 1e-13},
        {"tolerance": 0}, {"screen": MOST_PAIRS + 1}, {"confirm": 1 << 40}, {"futility": 10**40},
    ],
)  # fmt: skip
def test_impossible_rules_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"need|at most 500 pairs"):
        Rules(**bad)  # type: ignore[arg-type]


def test_minimum_detectable_effect_is_found_with_its_power() -> None:
    effect = minimum_detectable_effect(0.01, 25, margin=0.005, alpha=1e-3)
    assert effect is not None
    assert effect == pytest.approx(0.005 + 0.0102, abs=0.0007)
    assert minimum_detectable_effect(0.01, 5, margin=0.01, alpha=1e-3) is None
    draws = np.random.default_rng(3).normal(np.log1p(effect), 0.01, (4000, 25))
    assert np.mean(one_sided_p(draws, np.log1p(0.005)) <= 1e-3) == pytest.approx(0.9, abs=0.04)


def test_effects_and_pairs_can_be_told_at_the_limits_of_the_rules() -> None:
    rules = Rules(screen=MOST_PAIRS, confirm=MOST_PAIRS, futility=MOST_PAIRS, q=LEAST_Q)
    alpha = rules.q / 1000
    effect = minimum_detectable_effect(0.01, MOST_PAIRS, margin=rules.margin, alpha=alpha)
    assert effect is not None
    assert rules.margin < effect < rules.margin + 0.005
    assert (more_pairs([0.02, 0.03, 0.04], rules, cells=1_000_000) or 0) >= 40


def test_pair_sd_shrugs_off_outliers() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(0, 0.01, 400)
    values[::20] *= 30
    assert pair_sd(values) == pytest.approx(0.01, rel=0.15)
    assert pair_sd([0.01]) == 0.0
    assert pair_sd([0.0, 0.02]) == pytest.approx(np.std([0.0, 0.02], ddof=1))


def test_more_pairs_would_settle_it() -> None:
    rng = np.random.default_rng(5)
    noisy = list(rng.normal(0.0, 0.03, 5))
    wanted = more_pairs(noisy, RULES)
    assert wanted is not None
    settled = [
        decide([CellPairs(rng.normal(0.0, 0.03, 5 + wanted).tolist())], Rules(screen=5 + wanted))[0].verdict
        for _ in range(200)
    ]
    assert settled.count("equivalent") > 100
    assert more_pairs([], RULES) is None
    assert more_pairs([0.015] * 9, Rules(margin=0.02, tolerance=0.01)) is None
    assert more_pairs([0.1] * 5, RULES, cells=300) == 15  # 2^-15 <= q / 300
