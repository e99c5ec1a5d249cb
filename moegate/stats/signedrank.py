"""Wilcoxon's signed-rank test and what follows from it: margin tests, the Hodges-Lehmann estimate, its interval.

Every function takes an array of shape ``[..., n]`` (cells x pairs) and works along the last axis, so the code that
decides one real cell also decides the 120,000 cells of a self test. The null distribution is exact up to `EXACT_LIMIT`
pairs, with ties handled by mid-ranks and the exact distribution that belongs to them; beyond it a normal approximation.
A difference of exactly zero keeps its rank and counts against the alternative: a test may be shy, never bold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

EXACT_LIMIT = 200
"""Largest number of pairs for which the null distribution is computed exactly."""

_TIE_DECIMALS = 12  # timers are quantised: differences closer than 1e-12 in log ratio are the same reading


@dataclass(frozen=True)
class Interval:
    """A confidence interval for the median log ratio.

    low, high: bounds (log ratio). level: the confidence it really has; below the level that was asked for when too few
    pairs exist (5 pairs: 0.9375; 1 pair: 0).
    """

    low: float
    high: float
    level: float


def as_rows(log_ratios: ArrayLike) -> FloatArray:
    """Log ratios as float64 ``[..., n]``.

    Raises ValueError for an empty last axis or values that are not finite.
    """
    rows = np.asarray(log_ratios, dtype=np.float64)
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError("at least one pair is needed")
    if not np.all(np.isfinite(rows)):
        raise ValueError("log ratios must be finite")
    return rows


@lru_cache(maxsize=EXACT_LIMIT + 1)
def null_cdf(n: int) -> FloatArray:
    """P(W <= w) for w = 0 .. n(n+1)/2 under the null, no ties. Read-only float64 ``[n(n+1)/2 + 1]``."""
    cdf = np.minimum(np.cumsum(_sign_flip_pmf(tuple(range(1, n + 1)))), 1.0)
    cdf.flags.writeable = False
    return cdf


@lru_cache(maxsize=256)  # one of 200 pairs holds 320 KB
def _tied_cdf(doubled_ranks: tuple[int, ...]) -> FloatArray:
    """P(2W <= w) under the null for these doubled mid-ranks."""
    cdf = np.minimum(np.cumsum(_sign_flip_pmf(doubled_ranks)), 1.0)
    cdf.flags.writeable = False
    return cdf


def _sign_flip_pmf(ranks: tuple[int, ...]) -> FloatArray:
    pmf = np.zeros(sum(ranks) + 1)
    pmf[0] = 1.0
    reach = 0
    for rank in ranks:
        # Each rank counts with probability one half. Only sums: small tails keep their relative precision.
        pmf[rank : reach + rank + 1] += pmf[: reach + 1].copy()
        pmf *= 0.5
        reach += rank
    return pmf


def one_sided_p(log_ratios: ArrayLike, margin: float, direction: ArrayLike = 1) -> FloatArray:
    """P-value of "the median, seen in `direction`, exceeds `margin`" against "it does not".

    log_ratios: ``[..., n]``. margin: log ratio, may be negative (then it is one half of an equivalence test).
    direction: +1 or -1, scalar or ``[...]``. Returns ``[...]``.
    """
    rows = as_rows(log_ratios)
    shape, n = rows.shape[:-1], rows.shape[-1]
    signs = np.broadcast_to(np.asarray(direction, dtype=np.float64), shape).reshape(-1, 1)
    # Rounded before the sign is read: a reading that sits on the margin (or within noise of it) is a zero.
    shifted = np.round(rows.reshape(-1, n) * signs - margin, _TIE_DECIMALS)
    sizes = np.abs(shifted)
    order = np.argsort(sizes, axis=1, kind="stable")
    ordered = np.take_along_axis(sizes, order, axis=1)
    positive = np.take_along_axis(shifted, order, axis=1) > 0
    statistic: FloatArray = positive.astype(np.float64) @ np.arange(1, n + 1, dtype=np.float64)
    result = _upper_tail(statistic, n)
    tied = np.flatnonzero(np.any(ordered[:, 1:] == ordered[:, :-1], axis=1)) if n > 1 else ()
    for row in tied:
        result[row] = _tied_p(ordered[row], positive[row])
    return result.reshape(shape)


def _upper_tail(statistic: FloatArray, n: int) -> FloatArray:
    """P(W >= statistic): by symmetry P(W <= total - statistic)."""
    total = n * (n + 1) // 2
    if n <= EXACT_LIMIT:
        return np.asarray(null_cdf(n)[total - statistic.astype(np.int64)])
    sd = math.sqrt(n * (n + 1) * (2 * n + 1) / 24.0)
    return _normal_upper((statistic - 0.5 - total / 2.0) / sd)


def _normal_upper(z: FloatArray) -> FloatArray:
    return np.array([0.5 * math.erfc(value / math.sqrt(2.0)) for value in z])


def _tied_p(ordered: FloatArray, positive: NDArray[np.bool_]) -> float:
    """The p-value of one row whose sorted sizes hold ties."""
    n = ordered.size
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.append(starts, n))
    doubled = np.repeat(2 * starts + counts + 1, counts)  # twice the mid-rank: always a whole number
    statistic = int(doubled[positive].sum())
    if n <= EXACT_LIMIT:
        return float(_tied_cdf(tuple(int(rank) for rank in doubled))[int(doubled.sum()) - statistic])
    sd = math.sqrt(float(np.sum(doubled.astype(np.float64) ** 2)) / 4.0)
    return float(_normal_upper(np.array([(statistic - 1.0 - doubled.sum() / 2.0) / sd]))[0])


def equivalence_p(log_ratios: ArrayLike, tolerance: float) -> FloatArray:
    """P-value of "the median lies within +-tolerance": the larger of two one-sided signed-rank tests.

    log_ratios ``[..., n]``, tolerance a positive log ratio. Returns ``[...]``.
    """
    return np.maximum(one_sided_p(log_ratios, -tolerance, 1), one_sided_p(log_ratios, -tolerance, -1))


_AT_ONCE = 1 << 22  # Walsh averages in memory together, of however many cells


def walsh_averages(log_ratios: ArrayLike) -> FloatArray:
    """All pairwise means, i <= j: ``[..., n] -> [..., n(n+1)/2]``, unsorted. Memory grows with n squared."""
    rows = as_rows(log_ratios)
    first, second = _pairs(rows.shape[-1])
    return np.asarray(0.5 * (rows[..., first] + rows[..., second]))


@lru_cache(maxsize=64)  # one of 1,000 pairs holds 8 MB
def _pairs(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(n)


def hodges_lehmann(log_ratios: ArrayLike) -> FloatArray:
    """The Hodges-Lehmann estimate: the median of the Walsh averages. ``[..., n] -> [...]``."""
    count = _walsh_count(log_ratios)
    low, high = _order_statistics(log_ratios, ((count - 1) // 2, count // 2))
    return np.asarray(0.5 * (low + high))


def _walsh_count(log_ratios: ArrayLike) -> int:
    n = int(as_rows(log_ratios).shape[-1])
    return n * (n + 1) // 2


def _order_statistics(log_ratios: ArrayLike, ranks: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """The Walsh averages of two ranks, from 0: ``[..., n] -> two [...]``. Cells are taken in blocks, to save memory."""
    rows = as_rows(log_ratios)
    shape, n = rows.shape[:-1], rows.shape[-1]
    flat = rows.reshape(-1, n)
    found = np.empty((len(flat), 2))
    block = max(_AT_ONCE // _walsh_count(rows), 1)
    for at in range(0, len(flat), block):
        averages = walsh_averages(flat[at : at + block])
        found[at : at + block] = np.partition(averages, sorted(set(ranks)), axis=-1)[:, ranks]
    return found[:, 0].reshape(shape), found[:, 1].reshape(shape)


def interval(log_ratios: ArrayLike, level: float = 0.95) -> Interval:
    """Signed-rank interval of one cell's median log ratio, ``[n]``: `level`, or the widest attainable."""
    low, high, got = intervals(np.asarray(log_ratios, dtype=np.float64)[None, :], level)
    return Interval(float(low[0]), float(high[0]), got)


def intervals(log_ratios: ArrayLike, level: float = 0.95) -> tuple[FloatArray, FloatArray, float]:
    """Lower bounds ``[...]``, upper bounds ``[...]`` and the level that they really have, for ``[..., n]``."""
    count = _walsh_count(log_ratios)
    rank, got = _interval_rank(np.shape(log_ratios)[-1], level)
    low, high = _order_statistics(log_ratios, (rank, count - 1 - rank))
    return low, high, got


@lru_cache(maxsize=1024)
def _interval_rank(n: int, level: float) -> tuple[int, float]:
    """How many Walsh averages are cut from each end, and the level that this gives."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"a level lies between 0 and 1, not {level}")
    tail = (1.0 - level) / 2.0
    if n <= EXACT_LIMIT:
        cdf = null_cdf(n)
        rank = max(int(np.searchsorted(cdf, tail, side="right")) - 1, 0)
        return rank, 1.0 - 2.0 * float(cdf[rank])
    mean, sd = n * (n + 1) / 4.0, math.sqrt(n * (n + 1) * (2 * n + 1) / 24.0)
    return max(int(mean + NormalDist().inv_cdf(tail) * sd - 0.5), 0), level
