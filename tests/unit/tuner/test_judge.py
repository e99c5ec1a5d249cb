"""The judge of live tunings, on a simulated device whose true times are known."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tuner.child.client import WorkerLost
from tuner.config import Config
from tuner.replay import Recorded, load
from tuner.strategies.base import Unit, choose

ROOT = Path(__file__).resolve().parents[3]
SD = 0.015


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("judge", ROOT / "tests/gpu/judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge"] = module
    spec.loader.exec_module(module)
    return module


judging = _load()


class Device:
    """Times pairs: the recorded times are the true ones, every sample is off by 1.5 %."""

    def __init__(self, truth: Recorded, seed: int) -> None:
        self.truth, self.random = truth, random.Random(seed)
        self.asked: list[tuple[int, int, int]] = []

    def true(self, size: int, pair: dict[Any, Config]) -> float:
        return sum(self.truth.times[Unit(size, p, config)] for p, config in pair.items())

    def ask(self, size: int, pairs: Sequence[dict[Any, Config]], rounds: int) -> list[list[float]]:
        self.asked.append((size, len(pairs), rounds))
        times = [self.true(size, pair) for pair in pairs]
        drift = [1 + 0.01 * self.random.random() for _ in range(rounds)]
        return [[us * (1 + self.random.gauss(0, SD)) * d for d in drift] for us in times]


@pytest.fixture(scope="module")
def truth() -> Recorded:
    return load(ROOT / "tests/data/h200_moegate_bf16_tma.json.gz")


def _swept(truth: Recorded, seed: int) -> Recorded:
    """What a sweep of this device would have recorded: one noisy sample a config."""
    chance = random.Random(seed)
    return dataclasses.replace(truth, times={unit: us * (1 + chance.gauss(0, SD)) for unit, us in truth.times.items()})


def _chosen(truth: Recorded, seed: int, size: int) -> dict[str, dict[Any, Config]]:
    """Choices that are known to be more or less good."""
    found = choose(truth.arena(size), 40)
    assert found is not None
    chance = random.Random(f"{seed} {size}")
    return {"quick": found.contenders[chance.randrange(5, 40)], "full": found.contenders[chance.randrange(0, 6)]}


def test_the_judges_regret_is_true_and_the_sweeps_is_not(truth: Recorded) -> None:
    judged: dict[str, list[float]] = {"quick": [], "full": []}
    swept: dict[str, list[float]] = {"quick": [], "full": []}
    inside = []
    for seed in range(2):
        device, sweep = Device(truth, seed), _swept(truth, seed)
        pools = [judging.pool_of(size, _chosen(truth, seed, size), sweep) for size in truth.sizes[::3]]
        verdicts = judging.judge(pools, device.ask, 0.0, rounds=160)
        for found in verdicts:
            for name, pair in _chosen(truth, seed, found.size).items():
                regret = device.true(found.size, pair) / truth.best(found.size) - 1
                got = found.regrets[name]
                judged[name].append(got.regret - regret)
                inside.append(got.low - 0.0005 <= regret <= got.high + 0.0005)
                sample = sum(sweep.times[Unit(found.size, p, config)] for p, config in pair.items())
                swept[name].append(sample / sweep.best(found.size) - 1 - regret)
    for name in judged:
        assert abs(statistics.fmean(judged[name])) < 0.0015, name
        assert statistics.fmean(swept[name]) > 0.005, name  # the naive way: worse than 0.5 % off, always upwards
    assert statistics.fmean(inside) > 0.8


def test_picking_and_stating_by_the_same_rounds_flatters_the_reference() -> None:
    """Ten configs that are all alike: nobody has any regret, yet the luckiest of few rounds looks faster."""
    chance = random.Random(5)
    naive, fair = [], []
    for _ in range(200):
        samples = [[100 * (1 + chance.gauss(0, SD)) for _ in range(16)] for _ in range(10)]
        pool = judging.Pool(1, tuple({} for _ in range(10)), {"run": 0})
        fair.append(judging.verdict(pool, samples).regrets["run"].regret)
        means = [statistics.fmean(row) for row in samples]
        naive.append(means[0] / min(means) - 1)
    assert abs(statistics.fmean(fair)) < 0.001
    assert statistics.fmean(naive) > 0.004


def test_a_pool_is_narrowed_and_keeps_who_was_chosen(truth: Recorded) -> None:
    device = Device(truth, 1)
    chosen = _chosen(truth, 3, 64)
    pool = judging.pool_of(64, {**chosen, "again": chosen["full"]}, truth)
    assert judging.FIELD <= len(pool.pairs) <= 2 * (judging.FIELD + judging.TILES)
    assert pool.chosen["again"] == pool.chosen["full"]
    verdicts = judging.judge([pool], device.ask, 0.0)
    assert device.asked[0] == (64, len(pool.pairs), judging.FIRST_ROUNDS)
    assert device.asked[1][1] <= judging.BEST + 2
    assert set(verdicts[0].regrets) == {"quick", "full", "again"}
    assert verdicts[0].regrets["again"] == verdicts[0].regrets["full"]
    alone = judging.pool_of(64, chosen, None)
    assert alone.pairs == tuple(chosen.values())


def test_what_fails_is_left_out_and_the_rest_is_written(truth: Recorded, tmp_path: Path) -> None:
    device = Device(truth, 2)

    def moody(size: int, pairs: Sequence[dict[Any, Config]], rounds: int) -> list[list[float]]:
        if size == 64:
            raise WorkerLost("crashed", "killed by SIGSEGV")
        return device.ask(size, pairs, rounds)

    pools = [judging.pool_of(size, _chosen(truth, 0, size), truth) for size in (16, 64)]
    verdicts = judging.judge(pools, moody, 0.2, tmp_path / "judge.json", rounds=8)
    assert [found.size for found in verdicts] == [16]
    written = json.loads((tmp_path / "judge.json").read_text())
    assert written["passes"] >= 2  # passes go on while there is time
    assert written["rows"][0]["rounds"] == 8 * written["passes"]
    assert set(written["mean"]) == {"quick", "full"}
    assert len(judging.table(verdicts, ("quick", "full"))) == 4


def test_configs_that_do_not_compile_leave_the_pool() -> None:
    good, bad = Config.of({"BLOCK_SIZE_M": 16}), Config.of({"BLOCK_SIZE_M": 32})
    pool = judging.Pool(1, ({"up": bad}, {"up": good}), {"quick": 0, "full": 1})
    left = judging._without(pool, {("up", good)})
    assert left.pairs == ({"up": good},)
    assert left.chosen == {"full": 0}
