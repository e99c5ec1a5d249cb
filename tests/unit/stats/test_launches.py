"""The two launches of a pair: roles, values, and the one log ratio that scheduling and comparison agree on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from moegate.records import DeviceIdentity, Launch, PlannedCell, Samples
from moegate.stats import log_ratio, roles, turns

CPU = DeviceIdentity("cpu", "c", "cpu:host")


def launch(arm: str, value: float, pair: int = 0, order: int = 0, better: str = "higher", **more: Any) -> Launch:
    samples = (Samples("speed", "x", better, (value,), primary=True), Samples("other", "x", "lower", (1 / value,)))
    return Launch(CPU, "t", 0.0, samples, arm=arm, pair=pair, order=order, **more)


def test_a_log_ratio_is_positive_where_the_candidate_is_better() -> None:
    pair = [launch("b", 2.0, order=1), launch("a", 1.0)]
    assert log_ratio(pair, ("a", "b"), None) == pytest.approx(math.log(2))
    assert log_ratio(pair, ("b", "a"), None) == pytest.approx(-math.log(2))
    assert log_ratio(pair, ("a", "b"), "other") == pytest.approx(math.log(2)), "lower is better there"


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ([launch("a", 1.0)], "partner is missing"),
        ([launch("a", 1.0), launch("a", 1.0)], "partner is missing"),
        ([launch("a", 1.0), launch("b", math.inf)], "no positive value"),
        ([launch("a", 1.0), launch("b", 1.0, void_reason="short")], "short"),
        ([launch("a", 1.0, detail={"driver": "1"}), launch("b", 1.0, detail={"driver": "2"})], "driver"),
        ([launch("a", -1.0), launch("b", 1.0)], "no positive value"),
    ],
)
def test_what_is_no_pair_says_why(pair: list[Launch], why: str) -> None:
    assert why in log_ratio(pair, ("a", "b"), None)


def test_the_ratios_here_are_those_of_the_comparison() -> None:
    from moegate.records import Measurement
    from orchestrator.compare.effects import metric_pairs
    from orchestrator.compare.pairs import pair_up

    launches = [
        replace(launch(arm, 1.0 + 0.1 * n, pair=n // 2, order=n), stage="screen")
        for n, arm in enumerate(["a", "b", "b", "a", "a", "b"])
    ]
    cell = PlannedCell("c", "serve", "c", {}, "", 1.0, ("a", "b"))
    result = Measurement("serve", "ok", CPU, {}, {"n": 1}, tuple(launches))
    found = metric_pairs(pair_up(cell, ("a", "b"), [result]).pairs, None)
    here = [log_ratio(launches[n : n + 2], ("a", "b"), None) for n in (0, 2, 4)]
    assert found.signed() == pytest.approx(here)
    same = [replace(item, arm="a") for item in launches]
    result = replace(result, launches=tuple(same))
    found = metric_pairs(pair_up(replace(cell, arms=("a", "a"), aa=True), ("a", "a"), [result]).pairs, None)
    here = [log_ratio(same[n : n + 2], ("a", "a"), None) for n in (0, 2, 4)]
    assert found.signed() == pytest.approx(here), "A/A pairs take turns in both"


@pytest.mark.parametrize("seed", range(40))
def test_a_launch_that_runs_second_gets_each_role_equally_often(seed: int) -> None:
    """Whatever the second launch of a pair has from being second (a warm cache, a hotter device) favours no arm."""
    for arms in (("a", "b"), ("a", "a")):
        launches = [
            launch(turn.arm, 2.0 if turn.order % 2 else 1.0, turn.pair, turn.order) for turn in turns(12, seed, arms)
        ]
        pairs = [launches[n : n + 2] for n in range(0, 24, 2)]
        found = [log_ratio(pair, arms, None) for pair in pairs]
        assert sum(value == pytest.approx(math.log(2)) for value in found) == 6, arms
        assert sum(found) == pytest.approx(0.0)


def test_of_several_tries_the_last_counts() -> None:
    tries = [launch("a", 1.0, order=0), launch("b", 1.0, order=1), launch("b", 3.0, order=2), launch("a", 2.0, order=3)]
    found = roles(tries, ("a", "b"))
    assert not isinstance(found, str)
    assert [item.order for item in found] == [3, 2]
