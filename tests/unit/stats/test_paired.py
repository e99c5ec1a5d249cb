"""Accuracy over the same samples: non-inferiority, McNemar, refusals; and the covariates that void a pair."""

from __future__ import annotations

import numpy as np
import pytest

from moegate.stats import CHECKS, DifferentSamples, accuracy_non_inferiority, mcnemar, void_reason
from moegate.stats.paired import _tango


def answers(right: int, wrong: int, offset: int = 0) -> dict[str, float]:
    return {f"s{i + offset:05}": float(i < right) for i in range(right + wrong)}


def with_changes(base: dict[str, float], lost: int, gained: int) -> dict[str, float]:
    result = dict(base)
    for name in [n for n, score in base.items() if score == 1.0][:lost]:
        result[name] = 0.0
    for name in [n for n, score in base.items() if score == 0.0][:gained]:
        result[name] = 1.0
    return result


def test_equal_arms_are_equivalent_once_there_are_enough_samples() -> None:
    big = answers(1500, 500)
    assert accuracy_non_inferiority(big, big).verdict == "equivalent"
    small = answers(150, 50)
    result = accuracy_non_inferiority(small, small)
    assert result.verdict == "inconclusive"
    assert result.more_samples == pytest.approx(341, abs=3)
    enough = answers(150, 50 + result.more_samples)
    assert accuracy_non_inferiority(enough, enough).verdict == "equivalent"


def test_two_points_lost_is_a_regression_and_two_gained_an_improvement() -> None:
    base = answers(1600, 400)
    lost = accuracy_non_inferiority(base, with_changes(base, lost=40, gained=0))
    assert (lost.verdict, lost.lost, lost.gained) == ("regressed", 40, 0)
    assert lost.p is not None
    assert lost.p < 1e-9
    assert accuracy_non_inferiority(base, with_changes(base, lost=0, gained=40)).verdict == "improved"


def test_a_loss_within_the_margin_passes_though_it_is_significant() -> None:
    base = answers(80_000, 20_000)
    result = accuracy_non_inferiority(base, with_changes(base, lost=100, gained=0))
    assert result.high < 0
    assert result.verdict == "equivalent"


@pytest.mark.parametrize("sign", [1, -1])
def test_last_digits_are_no_difference_however_regular(sign: int) -> None:
    """Sums in another order round otherwise; where that has a direction, an interval of the mean excludes zero."""
    base = {f"s{i}": 0.02 + 0.001 * i for i in range(20)}
    result = accuracy_non_inferiority(base, {k: v + sign * 1e-9 * (1 + i % 3) for i, (k, v) in enumerate(base.items())})
    assert result.low * result.high > 0
    assert result.verdict == "equivalent"
    beyond = accuracy_non_inferiority(base, {k: v + sign * 0.006 for k, v in base.items()})
    assert beyond.verdict == ("improved" if sign > 0 else "regressed")


def test_different_samples_are_refused_by_name() -> None:
    with pytest.raises(DifferentSamples, match=r"5 only in the baseline, 5 only in the candidate \(s00000"):
        accuracy_non_inferiority(answers(10, 0), answers(10, 0, offset=5))


def test_no_samples_and_odd_scores() -> None:
    with pytest.raises(ValueError, match="no samples"):
        accuracy_non_inferiority({}, {})
    with pytest.raises(ValueError, match="between 0 and 1"):
        accuracy_non_inferiority({"a": 2.0}, {"a": 1.0})
    with pytest.raises(ValueError, match="between 0 and 1"):
        accuracy_non_inferiority({"a": float("nan")}, {"a": 1.0})


def test_graded_scores_use_the_mean_difference() -> None:
    rng = np.random.default_rng(1)
    base = {f"s{i}": float(v) for i, v in enumerate(rng.uniform(0.5, 0.9, 200))}
    near = {k: v + 0.001 * ((-1) ** i) for i, (k, v) in enumerate(base.items())}
    worse = {k: v - 0.02 + 0.01 * float(rng.standard_normal()) for k, v in base.items()}
    same = accuracy_non_inferiority(base, near)
    assert (same.verdict, same.p) == ("equivalent", None)
    assert accuracy_non_inferiority(base, worse).verdict == "regressed"
    assert accuracy_non_inferiority({"a": 0.5}, {"a": 0.5}).verdict == "inconclusive"


def test_mcnemar_known_values() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert 0 < mcnemar(900, 1100) < 1e-4


def test_tango_bounds_cover() -> None:
    """One-sided 95 % bounds: the true difference is below the lower one in about 5 % of the draws."""
    rng = np.random.default_rng(2)
    n, gain, loss = 400, 0.02, 0.03
    misses = 0
    for gained, lost, _ in rng.multinomial(n, [gain, loss, 1 - gain - loss], 2000):
        misses += _tango(int(gained), int(lost), n)[0] > gain - loss
    assert misses / 2000 == pytest.approx(0.05, abs=0.02)
    z2 = 1.6448536**2
    assert _tango(0, 0, 100)[0] == pytest.approx(-z2 / (100 + z2), rel=1e-5)
    assert _tango(3, 7, 50)[0] == pytest.approx(-_tango(7, 3, 50)[1])


GOOD = {"clock_mhz": 1980, "memory_clock_mhz": 2619, "power_limit_w": 650, "temperature_c": 50, "throttle_reasons": ""}


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("clock_mhz", 1980, 1900),
        ("memory_clock_mhz", 2619, 2000),
        ("power_limit_w", 650, 700),
        ("temperature_c", 40, 70),
        ("throttle_reasons", "", "sw_power_cap"),
        ("foreign_processes", 0, 1),
        ("driver", "580.1", "580.2"),
        ("sequence_sha256", "a", "b"),
        ("completed", 8, 7),
        ("input_sha256", "a", "b"),
    ],
)
def test_each_covariate_can_void(name: str, a: object, b: object) -> None:
    assert void_reason(GOOD | {name: a}, GOOD | {name: b}) == next(c.says for c in CHECKS if c.name == name)
    assert void_reason(GOOD | {name: a}, GOOD) is None or name in GOOD


def test_every_covariate_has_a_case_above() -> None:
    marks = test_each_covariate_can_void.pytestmark[0]  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == {check.name for check in CHECKS}


def test_equal_or_missing_readings_void_nothing() -> None:
    assert void_reason({}, {}) is None
    assert void_reason(GOOD, GOOD) is None
    assert void_reason(GOOD, GOOD | {"clock_mhz": 1975, "temperature_c": 55}) is None


def test_unreadable_readings_void() -> None:
    assert void_reason({"clock_mhz": "fast"}, {"clock_mhz": 1}) == "clock_mhz is not readable"
