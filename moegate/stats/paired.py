"""Two arms over the same samples: accuracy is compared sample by sample or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from moegate.stats.signedrank import FloatArray

_LEVEL = 0.95
_MANY = 1000  # discordant samples
_NORMAL = NormalDist()


class DifferentSamples(ValueError):
    """The arms did not answer the same questions, so no difference between them means anything."""


@dataclass(frozen=True)
class PairedAccuracy:
    """Candidate against baseline over identical samples.

    difference: mean score, candidate less baseline (0.005 is half a point). low, high: one-sided 95 % bounds each.
    gained, lost: samples that only the candidate, only the baseline got right (binary scores). p: exact McNemar test,
    two-sided; None for scores that are not 0 or 1. verdict: "equivalent" = not worse by the margin; "improved" = better
    and "regressed" = worse, where not shown to be within the margin; else "inconclusive".
    more_samples: about how many further samples non-inferiority would need; None where it is not the question.
    """

    samples: int
    baseline: float
    candidate: float
    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p: float | None
    verdict: Literal["improved", "regressed", "equivalent", "inconclusive"]
    more_samples: int | None


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p-value from the discordant counts."""
    total = gained + lost
    if total >= _MANY:  # terms of so many digits that summing them takes minutes
        from scipy.special import bdtr

        return min(1.0, 2.0 * float(bdtr(min(gained, lost), total, 0.5)))
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2.0 * tail / 2.0**total)


def accuracy_non_inferiority(
    baseline: Mapping[str, float], candidate: Mapping[str, float], margin: float = 0.005
) -> PairedAccuracy:
    """Compare two arms' scores (0..1) per sample id; `margin` in score units (0.005 is half a point).

    Raises DifferentSamples where the sets of ids differ, ValueError for no samples or scores outside 0..1.
    """
    if baseline.keys() != candidate.keys():
        raise DifferentSamples(_difference_of_sets(baseline, candidate))
    ids = sorted(baseline)
    if not ids:
        raise ValueError("there are no samples")
    old, new = np.array([baseline[i] for i in ids]), np.array([candidate[i] for i in ids])
    if not all(np.all((scores >= 0.0) & (scores <= 1.0)) for scores in (old, new)):
        raise ValueError("scores lie between 0 and 1")
    binary = bool(np.all(np.isin(old, (0.0, 1.0))) and np.all(np.isin(new, (0.0, 1.0))))
    gained, lost = int(np.sum(new > old)), int(np.sum(new < old))
    low, high = _tango(gained, lost, len(ids)) if binary else _mean_bounds(new - old)
    difference = float(np.mean(new - old))
    verdict = _verdict(low, high, margin)
    return PairedAccuracy(
        samples=len(ids),
        baseline=float(np.mean(old)),
        candidate=float(np.mean(new)),
        difference=difference,
        low=low,
        high=high,
        gained=gained,
        lost=lost,
        p=mcnemar(gained, lost) if binary else None,
        verdict=verdict,
        more_samples=_more(new - old, difference, margin, binary) if verdict == "inconclusive" else None,
    )


def _difference_of_sets(baseline: Mapping[str, float], candidate: Mapping[str, float]) -> str:
    old, new = sorted(baseline.keys() - candidate.keys()), sorted(candidate.keys() - baseline.keys())
    counts = f"{len(old)} only in the baseline, {len(new)} only in the candidate"
    return f"the arms answered different samples: {counts} ({', '.join((old + new)[:3])})"


def _verdict(low: float, high: float, margin: float) -> Literal["improved", "regressed", "equivalent", "inconclusive"]:
    if low > 0.0 and high >= margin:  # graded scores differ in their last digits with who was batched with whom
        return "improved"
    if low > -margin:
        return "equivalent"
    return "regressed" if high < 0.0 else "inconclusive"


def _mean_bounds(differences: FloatArray) -> tuple[float, float]:
    """One-sided 95 % t bounds of the mean of paired differences that are not binary."""
    n = differences.size
    if n < 2:
        return -1.0, 1.0
    from scipy.special import stdtrit

    reach = float(stdtrit(n - 1, _LEVEL)) * float(np.std(differences, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(differences))
    return mean - reach, mean + reach


def _tango(gained: int, lost: int, n: int) -> tuple[float, float]:
    """One-sided 95 % score bounds of a paired difference of proportions (Tango 1998): holds for few discordant ones."""
    z = _NORMAL.inv_cdf(_LEVEL)
    return _tango_bound(gained, lost, n, -z), _tango_bound(gained, lost, n, z)


def _tango_bound(gained: int, lost: int, n: int, z: float) -> float:
    """The difference at which the score statistic is -z: bisection, as the statistic falls with the difference."""
    estimate = (gained - lost) / n
    near, far = estimate, (1.0 if z > 0 else -1.0)
    for _ in range(60):
        middle = 0.5 * (near + far)
        if abs(_tango_score(gained, lost, n, middle)) < abs(z):
            near = middle
        else:
            far = middle
    return near


def _tango_score(gained: int, lost: int, n: int, delta: float) -> float:
    linear = -gained - lost + (2 * n - gained + lost) * delta
    constant = -lost * delta * (1.0 - delta)
    # The restricted estimate of P(only the baseline is right), given that the difference is delta.
    only_old = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * only_old + delta * (1.0 - delta))
    distance = gained - lost - n * delta
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)


def _more(differences: FloatArray, mean: float, margin: float, binary: bool) -> int | None:
    room = margin + mean
    if room <= 0.0:
        return None  # at this difference no number of samples shows non-inferiority
    n, z = differences.size, _NORMAL.inv_cdf(_LEVEL)
    variance = float(np.mean(differences**2)) - mean * mean
    # Without a discordant sample the score bound is z^2 / (n + z^2).
    floor = z * z * (1.0 - margin) / margin if binary else 2.0
    return max(math.ceil(max(z * z * variance / room**2, floor)) - n, 1)
