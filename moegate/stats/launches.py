"""From the two launches of a pair to its log ratio: one meaning for who decides on going on and for who judges.

The scheduler asks after each pair, the comparison asks again from the records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from moegate.records import Launch, Samples
from moegate.stats.covariates import void_reason

LEAST_VALUE, MOST_VALUE = 1e-30, 1e30
"""What a launch may have measured, in whatever unit: far beyond any time or rate."""


def roles(launches: Sequence[Launch], arms: tuple[str, str]) -> tuple[Launch, Launch] | str:
    """(baseline, candidate) among the launches of one pair, or why there is no pair. Of several tries the last counts.

    arms: (baseline, candidate). Where they are the same, the roles alternate with the pair's number, as in ABBA, so
    that a drift still cancels.
    """
    ordered = sorted(launches, key=lambda launch: -1 if launch.order is None else launch.order)
    if arms[0] == arms[1]:
        found = [[launch] for launch in ordered[-2:]]
        if len(found) == 2 and (ordered[-1].pair or 0) % 2:
            found.reverse()
    else:
        found = [[launch for launch in ordered if launch.arm == arm] for arm in arms]
    if len(found) < 2 or not all(found):
        return "its partner is missing"
    return found[0][-1], found[1][-1]


def samples_of(launch: Launch, metric: str | None) -> Samples | None:
    """The samples of a metric by name, or (None) of the launch's own primary metric."""
    if metric is None:
        return launch.primary()
    return next((samples for samples in launch.samples if samples.metric == metric), None)


def value_of(samples: Samples) -> float | None:
    """What a launch says of a metric: the median of its values; None where that is no usable number.

    That is one from `LEAST_VALUE` to `MOST_VALUE`: the ratio of two such overflows no exponential.
    """
    values = samples.values
    if not values:
        return None
    value = values[0] if len(values) == 1 else median(values)
    return value if LEAST_VALUE <= value <= MOST_VALUE else None


def log_ratio(launches: Sequence[Launch], arms: tuple[str, str], metric: str | None) -> float | str:
    """ln(candidate/baseline) of one pair, positive is better, or why its launches do not form a pair.

    metric: None is the launches' own primary one.
    """
    found = roles(launches, arms)
    if isinstance(found, str):
        return found
    baseline, candidate = found
    reason = baseline.void_reason or candidate.void_reason or void_reason(baseline.detail, candidate.detail)
    if reason is not None:
        return reason
    old, new = samples_of(baseline, metric), samples_of(candidate, metric)
    if old is None or new is None:
        return f"metric {metric or '(primary)'} was not measured"
    x, y = value_of(old), value_of(new)
    if x is None or y is None:
        return f"metric {old.metric} has no positive value"
    ratio = math.log(y) - math.log(x)
    return ratio if old.better == "higher" else -ratio
