"""As many pairs, cells and samples as there may be, and numbers beyond any: bounded time and memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from moegate.errors import RecordError
from moegate.records import DeviceIdentity, Launch, Samples, from_json
from moegate.records.plan import MOST_PAIRS
from moegate.stats import (
    Interval,
    hodges_lehmann,
    interval,
    intervals,
    mcnemar,
    minimum_detectable_effect,
    samples_of,
    shift,
    signedrank,
    two_sample_p,
    twosample,
    value_of,
    void_reason,
)


def peak_mib(work: Callable[[], Any]) -> float:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("decimals", [12, 1])  # the second: mostly ties
def test_estimates_in_blocks_are_those_of_each_cell_alone(decimals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signedrank, "_AT_ONCE", 500)
    rng = np.random.default_rng(4)
    for n in (1, 2, 3, 10, 41, 200, 201):
        rows = np.round(rng.standard_normal((3, 4, n)), decimals)
        centers, (low, high, level) = hodges_lehmann(rows), intervals(rows)
        rank, _ = signedrank._interval_rank(n, 0.95)
        for cell in np.ndindex(3, 4):
            averages = np.sort(0.5 * np.add.outer(rows[cell], rows[cell])[np.triu_indices(n)])
            assert centers[cell] == pytest.approx(np.median(averages), abs=1e-15)
            assert (low[cell], high[cell]) == (averages[rank], averages[-1 - rank])
            assert interval(rows[cell]) == Interval(low[cell], high[cell], level)


def test_the_null_distribution_does_not_ask_which_sample_is_first() -> None:
    assert twosample._null_pmf(3, 7) == pytest.approx(twosample._null_pmf(7, 3))


def test_the_most_pairs_that_two_stages_may_have_fit_into_memory() -> None:
    values = np.random.default_rng(6).standard_normal(2 * MOST_PAIRS)
    assert peak_mib(lambda: (hodges_lehmann(values), intervals(values[None, :]))) < 60
    assert peak_mib(lambda: (shift(values, values + 1.0), two_sample_p(values, values, 0.01))) < 60
    assert float(hodges_lehmann(values)) == pytest.approx(0.0, abs=0.1)
    assert shift(values, values + 1.0)[0] == pytest.approx(-1.0, abs=0.1)


def test_many_cells_are_estimated_in_parts() -> None:
    """All averages of these at once would be 600 MB."""
    rows = np.random.default_rng(7).standard_normal((40_000, 60))
    assert peak_mib(lambda: hodges_lehmann(rows)) < 250


def test_mcnemar_of_many_samples_is_exact_and_quick() -> None:
    tail = sum(math.comb(2000, k) for k in range(901))
    assert mcnemar(900, 1100) == pytest.approx(float(Fraction(2 * tail, 1 << 2000)), rel=1e-9)
    assert mcnemar(499, 501) == pytest.approx(mcnemar(499, 500), abs=0.05)  # on both sides of where it changes over
    assert mcnemar(200_000, 201_000) == pytest.approx(0.1145, abs=0.001)
    assert mcnemar(0, 500_000) == 0.0


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1e-31, 1e31, 1e308])
def test_what_nobody_measures_is_no_value(value: float) -> None:
    """Ratios of such numbers overflow every exponential behind."""
    launch = Launch(DeviceIdentity("cpu", "c", "cpu:x"), "", 1.0, (Samples("x", "s", "lower", (value,)),))
    found = samples_of(launch, "x")
    assert found is not None
    assert value_of(found) is None


def test_a_reading_that_is_no_number_voids_its_pair() -> None:
    assert void_reason({"clock_mhz": 10**400}, {"clock_mhz": 1}) == "clock_mhz is not readable"


def test_endless_noise_can_find_nothing() -> None:
    assert minimum_detectable_effect(1400.0, 60, margin=0.01, alpha=1e-3) is None


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 10**400])
def test_a_whole_number_beyond_64_bits_is_refused(number: int) -> None:
    device = {"kind": "cpu", "name": "c", "identity": "cpu:x"}
    with pytest.raises(RecordError, match="memory_bytes: is no number of 64 bits"):
        from_json(DeviceIdentity, {**device, "memory_bytes": number})
    assert from_json(DeviceIdentity, {**device, "memory_bytes": (1 << 63) - 1}).memory_bytes == (1 << 63) - 1
