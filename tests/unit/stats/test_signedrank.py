"""The signed-rank machinery against enumeration, scipy and hand-worked cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegate.stats import equivalence_p, hodges_lehmann, interval, intervals, one_sided_p, walsh_averages
from moegate.stats.signedrank import EXACT_LIMIT, null_cdf

FLOATS = st.floats(-0.5, 0.5, allow_nan=False).map(lambda x: round(x, 3))


def enumerated_p(values: list[float]) -> float:
    """P(W >= observed) by flipping every sign, mid-ranks for ties, zeros counted against."""
    sizes = np.abs(values)
    ranks = np.array([(np.sum(sizes < s) + 1 + np.sum(sizes <= s)) / 2 for s in sizes])
    observed = ranks[np.array(values) > 0].sum()
    flips = [ranks[np.array(signs, dtype=bool)].sum() for signs in itertools.product((0, 1), repeat=len(values))]
    return float(np.mean(np.array(flips) >= observed - 1e-9))


@given(st.lists(FLOATS, min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_p_equals_enumeration_with_ties_and_zeros(values: list[float]) -> None:
    assert float(one_sided_p(values, 0.0)) == pytest.approx(enumerated_p(values), abs=1e-12)


def test_p_agrees_with_scipy_where_there_are_no_ties() -> None:
    from scipy.stats import wilcoxon

    rng = np.random.default_rng(3)
    for n in (5, 12, 40):
        values = rng.normal(0.01, 0.02, n)
        expected = wilcoxon(values - 0.01, alternative="greater", method="exact").pvalue
        assert float(one_sided_p(values, 0.01)) == pytest.approx(expected, rel=1e-9)


def test_all_pairs_beyond_the_margin_give_the_smallest_p() -> None:
    assert float(one_sided_p([0.02, 0.03, 0.025, 0.04], 0.01)) == 2.0**-4
    assert float(one_sided_p([-0.02, -0.03, -0.025, -0.04], 0.01, -1)) == 2.0**-4
    assert float(one_sided_p([0.02] * 60, 0.01)) == 2.0**-60


def test_readings_on_the_margin_count_against() -> None:
    assert float(one_sided_p([0.01] * 6, 0.01)) == 1.0
    assert float(one_sided_p([0.01 + 1e-15] * 6, 0.01)) == 1.0


def test_rows_are_independent_and_directions_broadcast() -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(0, 0.02, (3, 4, 11))
    direction = rng.choice([-1, 1], (3, 4))
    together = one_sided_p(rows, 0.01, direction)
    assert together.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        assert together[i, j] == float(one_sided_p(rows[i, j], 0.01, direction[i, j]))


def test_the_normal_tail_meets_the_exact_one() -> None:
    rng = np.random.default_rng(5)
    for values in (rng.normal(0.001, 0.01, EXACT_LIMIT + 1), np.round(rng.normal(0.001, 0.01, EXACT_LIMIT + 1), 3)):
        exact = float(one_sided_p(values[:EXACT_LIMIT], 0.0))
        assert float(one_sided_p(values, 0.0)) == pytest.approx(exact, rel=0.35)
    rng = np.random.default_rng(6)
    p = one_sided_p(rng.normal(0, 1, (4000, EXACT_LIMIT + 50)), 0.0)
    assert np.mean(p <= 0.05) == pytest.approx(0.05, abs=0.012)


def test_p_is_uniform_under_the_null() -> None:
    p = one_sided_p(np.random.default_rng(7).normal(0, 0.01, (20000, 10)), 0.0)
    for level in (0.01, 0.05, 0.5):
        assert np.mean(p <= level) <= level + 4 * math.sqrt(level / 20000)


def test_null_distribution_sums_and_is_symmetric() -> None:
    cdf = null_cdf(6)
    pmf = np.diff(cdf, prepend=0.0)
    assert cdf[-1] == pytest.approx(1.0)
    np.testing.assert_allclose(pmf, pmf[::-1])
    assert cdf[0] == 2.0**-6
    with pytest.raises(ValueError, match="read-only"):
        cdf[0] = 1.0


def test_hodges_lehmann_by_hand() -> None:
    assert float(hodges_lehmann([1.0, 2.0, 6.0])) == pytest.approx(2.75)
    assert walsh_averages([1.0, 3.0]).tolist() == [1.0, 2.0, 3.0]


def test_interval_level_is_what_the_pairs_allow() -> None:
    five = interval([0.01, 0.02, 0.03, 0.04, 0.05])
    assert (five.low, five.high, five.level) == (0.01, 0.05, 1 - 2 / 32)
    one = interval([0.07])
    assert (one.low, one.high, one.level) == (0.07, 0.07, 0.0)
    assert interval(np.arange(6.0)).level == 1 - 2 / 64
    assert 0.95 <= interval(np.arange(30.0)).level < 0.96


@pytest.mark.parametrize("n", [6, 10, 25, EXACT_LIMIT + 5])
def test_interval_covers(n: int) -> None:
    count = 300 if n > 100 else 3000
    low, high, level = intervals(np.random.default_rng(n).standard_t(3, (count, n)))
    covered = np.mean((low <= 0) & (high >= 0))
    assert covered == pytest.approx(level, abs=4 * math.sqrt(0.05 * 0.95 / count))


@given(st.lists(FLOATS, min_size=2, max_size=14), FLOATS)
@settings(max_examples=50, deadline=None)
def test_interval_holds_exactly_the_medians_not_rejected(values: list[float], center: float) -> None:
    got = interval(values)
    tail = (1 - got.level) / 2
    if got.low + 1e-9 < center < got.high - 1e-9:
        assert float(one_sided_p(values, center)) > tail - 1e-12
        assert float(one_sided_p(values, -center, -1)) > tail - 1e-12


def test_equivalence_needs_both_sides() -> None:
    assert float(equivalence_p([0.001, -0.002, 0.003, 0.0, 0.001], 0.02)) == 2.0**-5
    assert float(equivalence_p([0.03, 0.031, 0.029, 0.032, 0.028], 0.02)) > 0.9
    assert float(equivalence_p([0.05, -0.05, 0.04, -0.04, 0.0], 0.02)) > 0.05


@pytest.mark.parametrize("bad", [[], [float("nan")], [float("inf"), 1.0], 3.0])
def test_no_numbers_no_statistics(bad: object) -> None:
    with pytest.raises(ValueError, match=r"pair|finite"):
        one_sided_p(bad, 0.01)  # type: ignore[arg-type]


def test_level_must_be_a_probability() -> None:
    with pytest.raises(ValueError, match="level"):
        interval([1.0, 2.0], level=95)
