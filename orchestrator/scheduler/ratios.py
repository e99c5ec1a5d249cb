"""The log ratio of a pair: what `moegate.stats` is asked with after each one.

Comparison recomputes all of this from the records; here it only decides whether a cell goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from moegate.records import Launch, Samples
from moegate.stats import void_reason

__all__ = ["log_ratio"]


def log_ratio(pair: Sequence[Launch], arms: tuple[str, str], metric: str | None) -> float | str:
    """ln(candidate/baseline) of one pair's two launches, positive is better, or why they do not form a pair.

    metric: None is the launches' own primary one.
    """
    if len(pair) != 2:
        return "its partner is missing"
    if arms[0] == arms[1]:
        # The roles of an A/A pair alternate with its number, as they do in comparison.
        first, second = sorted(pair, key=lambda launch: launch.order or 0)
        baseline, candidate = (first, second) if (first.pair or 0) % 2 == 0 else (second, first)
    else:
        by_arm = {launch.arm: launch for launch in pair}
        if set(by_arm) != set(arms):
            return "its launches are not of the two arms"
        baseline, candidate = by_arm[arms[0]], by_arm[arms[1]]
    for launch in (baseline, candidate):
        if launch.void_reason is not None:
            return launch.void_reason
    reason = void_reason(baseline.detail, candidate.detail)
    if reason is not None:
        return reason
    old, new = _samples(baseline, metric), _samples(candidate, metric)
    if old is None or new is None:
        return f"metric {metric or '(primary)'} was not measured"
    x, y = _value(old), _value(new)
    if x is None or y is None:
        return f"metric {old.metric} has no positive value"
    ratio = math.log(y) - math.log(x)
    return ratio if old.better == "higher" else -ratio


def _samples(launch: Launch, metric: str | None) -> Samples | None:
    if metric is None:
        return launch.primary()
    return next((samples for samples in launch.samples if samples.metric == metric), None)


def _value(samples: Samples) -> float | None:
    if not samples.values:
        return None
    value = median(samples.values)
    return value if value > 0 else None
