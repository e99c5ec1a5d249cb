"""Two independent sets of pairs: how far one is shifted against the other, and whether by more than a margin."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from moegate.stats.signedrank import FloatArray, Interval, as_rows

_EXACT_PRODUCT = 5000  # exact null distribution up to this many differences (70 x 70 pairs)
_TIE_DECIMALS = 12  # as in signedrank: differences closer than 1e-12 are the same reading


def shift(first: ArrayLike, second: ArrayLike, level: float = 0.95) -> tuple[float, Interval]:
    """The Hodges-Lehmann estimate of first - second with its Mann-Whitney interval (the widest attainable if need be).

    first ``[n]``, second ``[m]``: log ratios of two cells.
    """
    a, b = as_rows(first), as_rows(second)
    differences = np.sort(np.subtract.outer(a, b).ravel())
    rank, got = _rank(a.size, b.size, level)
    low, high = float(differences[rank]), float(differences[differences.size - 1 - rank])
    return float(np.median(differences)), Interval(low, high, got)


def two_sample_p(first: ArrayLike, second: ArrayLike, margin: float, direction: int = 1) -> float:
    """One-sided Mann-Whitney p-value of "first exceeds second, seen in `direction`, by more than `margin`".

    first ``[n]``, second ``[m]``, margin a log ratio (may be negative). A tie counts against: shy, never bold.
    """
    a, b = as_rows(first), as_rows(second)
    gaps = np.round(direction * np.subtract.outer(a, b) - margin, _TIE_DECIMALS)
    wins, size = int(np.sum(gaps > 0)), a.size * b.size
    if size <= _EXACT_PRODUCT:
        # By symmetry P(U >= wins) = P(U <= nm - wins).
        return min(float(np.sum(_null_pmf(a.size, b.size)[: size - wins + 1])), 1.0)
    sd = math.sqrt(size * (a.size + b.size + 1) / 12.0)
    return 0.5 * math.erfc((wins - 0.5 - size / 2.0) / sd / math.sqrt(2.0))


@lru_cache(maxsize=256)
def _rank(n: int, m: int, level: float) -> tuple[int, float]:
    """How many differences are cut from each end, and the level that this gives."""
    tail = (1.0 - level) / 2.0
    if n * m <= _EXACT_PRODUCT:
        cdf = np.cumsum(_null_pmf(n, m))
        rank = max(int(np.searchsorted(cdf, tail, side="right")) - 1, 0)
        return rank, max(1.0 - 2.0 * float(cdf[rank]), 0.0)
    sd = math.sqrt(n * m * (n + m + 1) / 12.0)
    return max(int(n * m / 2.0 + NormalDist().inv_cdf(tail) * sd - 0.5), 0), level


@lru_cache(maxsize=256)
def _null_pmf(n: int, m: int) -> FloatArray:
    """P(U = u), u = 0 .. nm: the count recursion over which sample holds the largest value."""
    if m > n:
        return _null_pmf(m, n)  # the same by symmetry, and as many rows as the smaller sample has values
    # row[j] after i rounds: the distribution of U for samples of i and j. Masses, not counts: nothing overflows.
    size = n * m + 1
    row = [_point(size) for _ in range(m + 1)]
    for i in range(1, n + 1):
        row[0] = _point(size)
        for j in range(1, m + 1):
            moved = np.zeros(size)
            moved[j:] = row[j][: size - j]  # the largest is of the first sample: it beats all j of the second
            row[j] = (i * moved + j * row[j - 1]) / (i + j)
    return row[m]


def _point(size: int) -> FloatArray:
    pmf = np.zeros(size)
    pmf[0] = 1.0
    return pmf
