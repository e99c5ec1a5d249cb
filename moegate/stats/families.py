"""Many cells at once: Benjamini-Hochberg, what can be detected at all, and the observed false-alarm rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moegate.stats.signedrank import FloatArray


@dataclass(frozen=True)
class Rate:
    """An observed rate with its exact (Clopper-Pearson) interval."""

    events: int
    trials: int
    low: float
    high: float
    level: float

    @property
    def rate(self) -> float:
        """events / trials; 0 without trials."""
        return self.events / self.trials if self.trials else 0.0


def benjamini_hochberg(p_values: ArrayLike, q: float) -> NDArray[np.bool_]:
    """Which hypotheses are rejected at false discovery rate `q`. ``[m] -> [m]``; an empty family rejects nothing."""
    p = np.asarray(p_values, dtype=np.float64)
    return np.asarray(adjusted_p(p) <= q)


def adjusted_p(p_values: ArrayLike) -> FloatArray:
    """Benjamini-Hochberg adjusted p-values, ``[m] -> [m]``: a cell is rejected at `q` exactly when its value is <= q.

    Raises ValueError for p-values outside 0..1 or more than one axis.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1:
        raise ValueError("one p-value per cell")
    if p.size and not (np.all(p >= 0.0) and np.all(p <= 1.0)):
        raise ValueError("p-values lie between 0 and 1")
    order = np.argsort(p, kind="stable")
    scaled = p[order] * p.size / np.arange(1, p.size + 1)
    result = np.empty_like(p)
    result[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return result


def pairs_to_detect(q: float, cells: int) -> int:
    """The fewest confirmation pairs with which one cell of a family of `cells` can be found at all.

    The smallest p-value of n pairs is 2^-n; Benjamini-Hochberg asks the best of m cells for q/m.
    Raises ValueError unless 0 < q < 1.
    """
    if not 0.0 < q < 1.0:
        raise ValueError(f"q lies between 0 and 1, not {q}")
    return max(math.ceil(math.log2(max(cells, 1) / q)), 1)


def detectable(confirm: int, q: float, cells: int) -> bool:
    """Whether `confirm` pairs can find anything: 2^-confirm <= q / cells. `orchestrator plan` warns when not."""
    return confirm >= pairs_to_detect(q, cells)


def clopper_pearson(events: int, trials: int, level: float = 0.95) -> Rate:
    """Exact interval of a proportion: two-sided, so that each end alone holds at ``(1 + level) / 2``.

    For "at most so much", which asks for one end only, take `at_most`.
    Raises ValueError unless 0 <= events <= trials and 0 < level < 1.
    """
    if not 0 <= events <= trials:
        raise ValueError(f"{events} of {trials} is not a proportion")
    if not 0.0 < level < 1.0:
        raise ValueError(f"a level lies between 0 and 1, not {level}")
    from scipy.special import betaincinv  # here: scipy costs more than the whole command line

    tail = (1.0 - level) / 2.0
    low = float(betaincinv(events, trials - events + 1, tail)) if events else 0.0
    high = float(betaincinv(events + 1, trials - events, 1.0 - tail)) if events < trials else 1.0
    return Rate(events=events, trials=trials, low=low, high=high, level=level)


def at_most(events: int, trials: int) -> float:
    """The rate that is not exceeded at 95 % confidence: the one-sided exact (Clopper-Pearson) upper bound, 0..1.

    0 of 1 leaves 0.95, 0 of 59 leaves 0.05. Raises ValueError unless 0 <= events <= trials.
    """
    return clopper_pearson(events, trials, level=0.90).high  # 5 % beyond each end
