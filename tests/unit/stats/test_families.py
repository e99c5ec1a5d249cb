"""Benjamini-Hochberg, detectability and the exact interval of a rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegate.stats import adjusted_p, at_most, benjamini_hochberg, clopper_pearson, detectable, pairs_to_detect


def step_up(p: list[float], q: float) -> list[bool]:
    """The definition: the largest k with p_(k) <= qk/m; everything up to it is rejected."""
    m = len(p)
    passing = [k for k, value in enumerate(sorted(p), start=1) if value <= q * k / m]
    limit = sorted(p)[max(passing) - 1] if passing else -1.0
    return [value <= limit for value in p]


@given(st.lists(st.integers(0, 1000).map(lambda i: i / 1000), max_size=30), st.sampled_from([0.01, 0.05, 0.2]))
def test_benjamini_hochberg_is_the_step_up_rule(p: list[float], q: float) -> None:
    # p * m / i and q * i / m round differently on an exact tie: leave a hair's breadth.
    assert benjamini_hochberg(p, q + 1e-12).tolist() == step_up(p, q + 1e-12)


def test_adjusted_p_agrees_with_scipy() -> None:
    from scipy.stats import false_discovery_control

    p = np.random.default_rng(1).uniform(size=50) ** 3
    np.testing.assert_allclose(adjusted_p(p), false_discovery_control(p))


def test_families_refuse_what_is_not_a_p_value() -> None:
    for bad in ([1.5], [-0.1], [float("nan")], [[0.1, 0.2]]):
        with pytest.raises(ValueError, match="p-value"):
            adjusted_p(bad)


def test_detectable() -> None:
    assert pairs_to_detect(0.01, 300) == 15
    assert detectable(15, 0.01, 300)
    assert not detectable(14, 0.01, 300)
    assert detectable(8, 0.01, 2)
    assert not detectable(6, 0.01, 1)
    assert pairs_to_detect(0.5, 1) == 1
    with pytest.raises(ValueError, match="q lies"):
        pairs_to_detect(0.0, 3)


def test_clopper_pearson_known_values() -> None:
    none = clopper_pearson(0, 400)
    assert none.low == 0.0
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 400))
    some = clopper_pearson(3, 20)
    assert (some.low, some.high) == (pytest.approx(0.03207, abs=1e-5), pytest.approx(0.37893, abs=1e-5))
    assert clopper_pearson(20, 20).high == 1.0
    assert clopper_pearson(0, 0).high == 1.0
    assert clopper_pearson(0, 0).rate == 0.0
    with pytest.raises(ValueError, match="proportion"):
        clopper_pearson(3, 2)
    with pytest.raises(ValueError, match="level"):
        clopper_pearson(1, 2, level=2.0)


def test_at_most_is_a_bound_of_one_side() -> None:
    for trials in (1, 4, 59, 400):
        assert at_most(0, trials) == pytest.approx(1 - 0.05 ** (1 / trials))  # 0 events with 5 % chance
    # As rare under the bound as 5 %: P(at most 1 of 100 | p) = 0.05.
    p = at_most(1, 100)
    assert (1 - p) ** 100 + 100 * p * (1 - p) ** 99 == pytest.approx(0.05)
    assert at_most(2, 2) == at_most(0, 0) == 1.0
