"""What a number of pairs can find, and how many more would settle a cell.

Both assume normal noise: good to plan by, never used for a verdict. The detectable effect is read off a simulation,
as a rank test of few pairs at a small p-value is far weaker than its normal approximation says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, median, quantiles

import numpy as np
from numpy.typing import ArrayLike

from moegate.stats.signedrank import as_rows, hodges_lehmann, one_sided_p
from moegate.stats.stages import EQUIVALENCE_ALPHA, Rules

_EFFICIENCY = math.sqrt(math.pi / 3.0)
_NORMAL = NormalDist()
_MAD_TO_SD = 1.4826
_MOST_LOG = 100.0  # of a change: no run has ever seen one of e^100


def pair_sd(log_ratios: ArrayLike) -> float:
    """A robust standard deviation of one cell's log ratios ``[n]``.

    The larger of the scaled median absolute deviation and the interquartile range over 1.349, so that half of the
    values being equal does not make a noisy cell look still; the plain deviation below five pairs. 0 for one pair.
    """
    values = as_rows(log_ratios)
    if values.size < 2:
        return 0.0
    if values.size < 5:
        return float(np.std(values, ddof=1))
    ordered: list[float] = sorted(values.tolist())  # a handful of numbers: plain Python is faster than numpy here
    center = median(ordered)
    mad = _MAD_TO_SD * median([abs(value - center) for value in ordered])
    low, _, high = quantiles(ordered, n=4, method="inclusive")
    return max(mad, (high - low) / 1.349)


def minimum_detectable_effect(
    sd: float, pairs: int, *, margin: float, alpha: float, power: float = 0.9
) -> float | None:
    """The smallest true change (fraction) that `pairs` confirmation pairs find with probability `power`.

    sd: per pair, log ratio. margin: fraction. alpha: the p-value that is needed (q / cells of the family for the worst
    case). None where 2^-pairs > alpha: then nothing can be found, however large; so it is where the noise is endless.
    """
    if pairs < 1 or 2.0**-pairs > alpha:
        return None
    effect = math.log1p(margin) + sd * _reach(pairs, alpha, power)
    return math.expm1(effect) if effect < _MOST_LOG else None


@lru_cache(maxsize=512)
def _reach(pairs: int, alpha: float, power: float) -> float:
    """How many standard deviations beyond the margin are found with this power: bisection over fixed normal draws."""
    draws = np.random.default_rng(20_000 + pairs).standard_normal((max(240_000 // pairs, 400), pairs))
    low, high = 0.0, 64.0
    for _ in range(18):
        middle = 0.5 * (low + high)
        if float(np.mean(one_sided_p(draws + middle, 0.0) <= alpha)) < power:
            low = middle
        else:
            high = middle
    return high


def more_pairs(log_ratios: Sequence[float], rules: Rules, cells: int = 1, power: float = 0.8) -> int | None:
    """About how many further pairs would settle an inconclusive cell, or None where no number would.

    The estimate so far is taken for the truth. A change above the margin needs pairs enough for q / cells; one within
    the tolerance needs enough for equivalence; the cheaper of the two counts. None without pairs, or where a tolerance
    below the margin leaves the estimate between the two.
    """
    if not log_ratios:
        return None
    size = abs(float(hodges_lehmann(log_ratios)))
    sd = pair_sd(log_ratios)
    wanted = []
    if size > rules.log_margin:
        alpha = rules.q / max(cells, 1)
        # Fresh pairs only prove a direction: none of those that exist count.
        wanted.append(_pairs_for(sd, size - rules.log_margin, alpha, power))
    if size < rules.log_tolerance:
        wanted.append(_pairs_for(sd, rules.log_tolerance - size, EQUIVALENCE_ALPHA, power) - len(log_ratios))
    return max(min(wanted), 1) if wanted else None


def _pairs_for(sd: float, distance: float, alpha: float, power: float) -> int:
    """Pairs for a one-sided test at `alpha` of a median this far from its bound; 2^-n <= alpha in any case."""
    z = _NORMAL.inv_cdf(power) - _NORMAL.inv_cdf(alpha)  # 1 - alpha is 1 where alpha is tiny
    floor = math.ceil(math.log2(1.0 / alpha))
    return min(max(math.ceil((z * sd * _EFFICIENCY / distance) ** 2), floor), 1_000_000)
