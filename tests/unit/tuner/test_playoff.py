"""Finals: alternating rounds under noise, who drops out, who wins."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from tuner.config import Config
from tuner.effort import EFFORTS, Effort
from tuner.finals import decide
from tuner.noisy import Noise, NoisyReplay, noisy_score
from tuner.playoff import FIRST, levels, play
from tuner.prior import load as load_prior
from tuner.replay import Recorded, load, task_of
from tuner.strategies import strategy
from tuner.strategies.base import Arena, Outcome, Unit, choose

OURS = Path(__file__).resolve().parents[2] / "data/h200_moegate_bf16_tma.json.gz"


class Device:
    """Known times, noise, and a drift that grows with every sample."""

    def __init__(self, times: Sequence[float], sd: float, drift: float = 0.0, seed: int = 0) -> None:
        self.times, self.sd, self.drift = times, sd, drift
        self.random = random.Random(seed)
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, places: Sequence[int]) -> list[float]:
        self.asked.append(tuple(places))
        done = sum(map(len, self.asked))
        return [self.times[p] * (1 + self.drift * done) * (1 + self.random.gauss(0, self.sd)) for p in places]


def test_rounds_alternate_and_the_slow_drop_out() -> None:
    device = Device([100.0, 150.0, 101.0], 0.002)
    rows = play(device, 3, 200)
    assert device.asked[:2] == [(0, 1, 2), (2, 1, 0)]
    assert len(rows[1]) == FIRST
    assert len(rows[0]) >= len(rows[2]) >= FIRST
    assert len(rows[0]) < 200
    whole = play(Device([100.0, 150.0, 101.0], 0.002), 3, 20, drop=False)
    assert [len(row) for row in whole] == [20, 20, 20]


def test_who_is_as_good_is_not_told_apart_for_ever() -> None:
    quiet = play(Device([100.0, 100.01], 0.0005), 2, 1000)
    loud = play(Device([100.0, 100.01], 0.02), 2, 100)
    assert len(quiet[0]) < 50
    assert len(loud[0]) == 100


@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_the_best_wins_under_noise(drift: float) -> None:
    times = [100.0, 103.0, 100.9, 102.0, 106.0, 101.5]
    won = []
    for seed in range(20):
        rows = play(Device(times, 0.015, drift, seed), len(times), 200)
        won.append(times[decide(rows, 1)[0]])
    assert statistics.fmean(won) < 100.2
    assert max(won) < 101


def test_levels_are_free_of_what_rounds_have_in_common() -> None:
    factors = [1 + 0.1 * math.cos(turn / 10) for turn in range(30)]
    rows = [[us * f for f in factors[:n]] for us, n in ((10.0, 30), (11.0, 8), (10.5, 16))]
    found, noise = levels(rows)
    assert found[1] - found[0] == pytest.approx(math.log(1.1), abs=1e-4)
    assert found[2] - found[0] == pytest.approx(math.log(1.05), abs=1e-4)
    assert noise < 1e-3
    # Medians of all that each has would not say so: the one that left early was there in a slow time.
    assert statistics.median(rows[1]) / statistics.median(rows[0]) > 1.11


def test_a_clock_too_coarse_for_a_call_ends_no_finals() -> None:
    assert decide([[0.0] * FIRST, [0.0] * FIRST], 0) == [0, 1]
    rows = play(lambda places: [0.0 for _ in places], 3, 2 * FIRST)
    assert [len(row) for row in rows] == [FIRST] * 3


def test_a_stray_sample_decides_nothing() -> None:
    rows = [[10.0] * 15 + [100.0], [10.2] * 16]
    found, _ = levels(rows)
    assert found[0] < found[1]


def test_one_candidate_plays_alone() -> None:
    rows = play(Device([5.0], 0.01), 1, 64)
    assert len(rows[0]) == FIRST
    assert decide(rows, 0) == [0]


def test_the_best_choices_meet_in_the_finals() -> None:
    def config(block: int, width: int) -> Config:
        return Config.of({"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": width})

    arena = Arena(1, ("up", "down"))
    times = {("up", 16, 64): 10.0, ("up", 16, 128): 10.1, ("up", 64, 64): 12.0, ("down", 16, 64): 5.0,
             ("down", 16, 128): 5.3, ("down", 64, 64): 3.2, ("down", 128, 64): 1.0}  # fmt: skip
    arena.add(Outcome(Unit(1, p, config(m, n)), 0, (us,)) for (p, m, n), us in times.items())  # type: ignore[arg-type]
    choice = choose(arena, 4)
    assert choice is not None
    found = [(pair["up"], pair["down"]) for pair in choice.contenders]
    assert found == [
        (config(16, 64), config(16, 64)),  # 15.0
        (config(16, 128), config(16, 64)),  # 15.1
        (config(64, 64), config(64, 64)),  # 15.2, another BLOCK_SIZE_M
        (config(16, 64), config(16, 128)),  # 15.3
    ]
    assert choice.configs == choice.contenders[0]
    assert choice.time_us == 15.0


@pytest.fixture(scope="module")
def ours() -> Recorded:
    return load(OURS)


def _timed(times: dict[tuple[int, int, int], tuple[float, float]]) -> Arena:
    """Times of up and down by (BLOCK_SIZE_M, BLOCK_SIZE_N, GROUP_SIZE_M)."""
    arena = Arena(512, ("up", "down"))
    for (m, n, group), both in times.items():
        config = Config.of({"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "GROUP_SIZE_M": group})
        for p, us in zip(arena.projections, both, strict=True):
            arena.add([Outcome(Unit(512, p, config), 0, (us,))])
    return arena


def test_a_tile_meets_itself_in_the_finals_only_where_others_are_far() -> None:
    near = {(16, n, g): (10.0 + n / 1000 + g / 10_000, 5.0 + g / 10_000) for n in (64, 128) for g in (1, 16, 32, 64)}
    plain, once = choose(_timed(near), 6), choose(_timed(near), 6, ["GROUP_SIZE_M"])
    assert plain is not None
    assert once is not None
    tiles = [tuple(c.without("GROUP_SIZE_M") for c in pair.values()) for pair in once.contenders]
    assert len(once.contenders) == 6
    assert len(set(tiles)) == 4  # two of up, two of down
    assert len({tuple(c.without("GROUP_SIZE_M") for c in pair.values()) for pair in plain.contenders}) < 4
    assert once.contenders[0] == plain.contenders[0] == once.configs
    far = {
        (m, n, g): (us * (2.0 if n > 64 else 1.0), down) for (m, n, g), (us, down) in near.items() if n == 64 or g < 9
    }
    found = choose(_timed(far), 6, ["GROUP_SIZE_M"])
    assert found is not None
    assert {pair["up"].integer("BLOCK_SIZE_N") for pair in found.contenders} == {64}


@pytest.mark.parametrize(("behind", "rivals"), [(1.05, 6), (1.2, 0)])
def test_another_block_that_comes_near_is_in_the_finals(behind: float, rivals: int) -> None:
    rows = {(128, n, 1): (100 + n / 1000, 50 + n / 1000) for n in (32, 64, 128, 256)}
    arena = _timed(rows | {(64, n, 1): (behind * a, behind * b) for (_, n, _), (a, b) in rows.items()})
    found = choose(arena, 12)
    assert found is not None
    assert len(found.contenders) == 12 + rivals
    assert sum(pair["up"].block_m == 64 for pair in found.contenders) == rivals


def _regret_of_the_search(recorded: Recorded, effort: Effort, noise: Noise, served: Recorded) -> float:
    task = task_of(recorded, effort, load_prior().without("sm_90"))
    findings = strategy("racing").tune(task, NoisyReplay(recorded, noise))
    times = {
        size: sum(served.times[Unit(size, p, c)] for p, c in choice.configs.items())
        for size, choice in findings.choices.items()
    }
    return statistics.fmean(us / served.best(size) - 1 for size, us in times.items())


@pytest.mark.parametrize(
    ("effort", "seeds", "mean", "worst", "samples"),
    [("quick", 4, 0.0035, 0.02, 17_000), ("full", 2, 0.0015, 0.01, 45_000)],
)
def test_a_tuning_under_noise(ours: Recorded, effort: str, seeds: int, mean: float, worst: float, samples: int) -> None:
    """Every sample is off by 1.5 %, and the machine drifts by 1 % meanwhile."""
    prior = load_prior().without("sm_90")
    found = []
    for seed in range(seeds):
        noise = Noise(seed=seed)
        found.append(noisy_score(ours, strategy("racing"), prior, EFFORTS[effort], noise))
        assert noise.samples <= samples  # what it costs on a device
    assert statistics.fmean(score.mean for score in found) <= mean
    assert max(score.worst for score in found) <= worst


def _served(recorded: Recorded, seed: int) -> Recorded:
    """What every tile takes within the whole op: up to 3 % more or less than alone."""

    def share(unit: Unit) -> float:
        tile = unit.config.without("GROUP_SIZE_M").spell()
        return 1 + random.Random(f"{seed} {unit.batch_size} {unit.projection} {tile}").uniform(-0.03, 0.03)

    return dataclasses.replace(recorded, times={unit: us * share(unit) for unit, us in recorded.times.items()})


def test_the_finals_find_what_projections_timed_alone_do_not_say(ours: Recorded) -> None:
    effort, prior = EFFORTS["quick"], load_prior().without("sm_90")
    search, finals = [], []
    for seed in range(3):
        served = _served(ours, seed)
        search.append(_regret_of_the_search(ours, effort, Noise(seed=seed), served))
        finals.append(noisy_score(ours, strategy("racing"), prior, effort, Noise(seed=seed), served))
    assert statistics.fmean(found.mean for found in finals) < 0.5 * statistics.fmean(search)
    assert statistics.fmean(found.mean for found in finals) < 0.006


def test_noise_is_the_same_again() -> None:
    first, second = ([noise.factor() for _ in range(5)] for noise in (Noise(seed=1), Noise(seed=1)))
    assert first == second
    many = [Noise(0.02, 0.0, seed=seed).factor() for seed in range(100)]
    assert statistics.stdev(many) == pytest.approx(0.02, rel=0.3)
