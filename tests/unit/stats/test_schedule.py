"""ABBA blocks: balanced, seeded, prefix-stable, and blind to drift."""

from __future__ import annotations

import numpy as np
import pytest

from moegate.stats import hodges_lehmann, schedule, turns


def test_blocks_are_abba_or_baab() -> None:
    orders = schedule(400, "cell-1/screen")
    blocks = {orders[i : i + 2] for i in range(0, 400, 2)}
    assert blocks == {("AB", "BA"), ("BA", "AB")}
    flips = sum(orders[i] == "BA" for i in range(0, 400, 2))
    assert 70 < flips < 130


def test_an_odd_last_pair_takes_half_a_block() -> None:
    for seed in range(20):
        assert schedule(5, seed) == schedule(6, seed)[:5]
        assert schedule(10, seed) == schedule(60, seed)[:10]
    assert {schedule(1, seed) for seed in range(20)} == {("AB",), ("BA",)}


def test_seeds_differ_and_repeat() -> None:
    assert schedule(40, 1) == schedule(40, 1)
    assert schedule(40, 1) != schedule(40, 2)


def test_turns_name_arm_pair_and_order() -> None:
    result = turns(2, 0, ("untuned", "tuned"))
    assert [turn.order for turn in result] == [0, 1, 2, 3]
    assert [turn.pair for turn in result] == [0, 0, 1, 1]
    arms = [turn.arm for turn in result]
    assert arms in (["untuned", "tuned", "tuned", "untuned"], ["tuned", "untuned", "untuned", "tuned"])
    assert [turn.arm for turn in turns(2, 0, ("x", "x"))] == ["x"] * 4


def test_no_pairs_and_negative() -> None:
    assert schedule(0, 1) == ()
    with pytest.raises(ValueError, match="negative"):
        schedule(-1, 1)


@pytest.mark.parametrize("pairs", [5, 6, 10, 60])
def test_a_linear_drift_of_3_percent_leaves_no_bias(pairs: int) -> None:
    """3 % over the stage, noise of 1 % per pair: the mean estimate over seeds stays within 0.05 %."""
    rng = np.random.default_rng(11)
    estimates = []
    for seed in range(3000):
        logs = {}
        for turn in turns(pairs, seed, ("A", "B")):
            drift = 0.03 * turn.order / (2 * pairs - 1)
            logs[turn.pair, turn.arm] = drift + rng.normal(0, 0.01 / np.sqrt(2))
        estimates.append([logs[pair, "B"] - logs[pair, "A"] for pair in range(pairs)])
    assert abs(np.mean(hodges_lehmann(estimates))) < 0.0005


def test_the_same_drift_would_bias_a_plain_order() -> None:
    """The guard of the test above: without ABBA the bias is there to be seen."""
    pairs = 10
    plain = [0.03 / 2 * (1 + 1 / (2 * pairs - 1))] * pairs  # AAAA..BBBB: every pair spans half the run
    assert float(hodges_lehmann(plain)) > 0.015
