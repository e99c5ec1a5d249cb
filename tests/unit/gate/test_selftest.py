"""The promise of the gate, kept: false alarms, power and cost, through the code that gates real runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moegate.stats import Rules, hodges_lehmann, next_stage
from orchestrator.gate.selftest import World, _draw, _measure, selftest


@pytest.mark.parametrize("seed", [1, 20261129])
@pytest.mark.parametrize(("sd", "power", "cost"), [(0.01, 0.95, 7.0), (0.02, 0.85, 12.0)])
def test_the_contract(seed: int, sd: float, power: float, cost: float) -> None:
    result = selftest(World(sd=sd, seed=seed))
    assert result.runs == 400
    assert result.false_alarm_runs <= 1
    assert result.power >= power
    assert result.mean_pairs_per_cell <= cost


def test_it_can_fail() -> None:
    """Without a margin and with a careless q the same code does raise false alarms."""
    careless = Rules(margin=0.0, q=0.5, confirm=10, futility=None)
    assert selftest(World(cells=100, runs=20, outliers=0.0), careless).false_alarm_runs > 5
    assert selftest(World(cells=50, runs=20, shift=0.0)).power == 0.0


def test_seeds_repeat() -> None:
    small = World(cells=20, runs=10, seed=3)
    assert selftest(small) == selftest(small)
    assert selftest(small) != selftest(replace(small, seed=4, sd=0.011))


def test_the_simulated_scheduler_asks_as_the_real_one() -> None:
    """Replaying each simulated cell pair by pair through `next_stage` takes exactly the pairs that it took."""
    rules, world = Rules(), World(cells=120, sd=0.02)
    truth = np.where(np.arange(120) < 20, -0.03, 0.0)
    for cell in _measure(world, truth, rules, np.random.default_rng(5), "x"):
        screen: list[float] = []
        confirm: list[float] = []
        while (answer := next_stage(screen, confirm, rules)).stage != "done":
            (screen if answer.stage == "screen" else confirm).append(
                cell.screen[len(screen)] if answer.stage == "screen" else cell.confirm[len(confirm)]
            )
        assert (len(screen), len(confirm)) == (len(cell.screen), len(cell.confirm))


def test_a_drift_of_3_percent_changes_nothing() -> None:
    drifting = selftest(World(cells=100, runs=60, sd=0.01, drift=0.03, seed=2))
    assert drifting.false_alarm_runs == 0
    assert drifting.power > 0.95
    world = World(sd=0.005, outliers=0.0, drift=0.03)
    rng = np.random.default_rng(1)
    rows = [
        _draw(world, np.zeros(1), np.full(1, world.sd), np.zeros(1, np.intp), 10, rng, f"s{i}")[0] for i in range(2000)
    ]
    assert abs(float(np.mean(hodges_lehmann(rows)))) < 0.0005


def test_nothing_shifted_has_no_power() -> None:
    assert selftest(World(cells=5, runs=2, shifted=0)).power == 0.0
