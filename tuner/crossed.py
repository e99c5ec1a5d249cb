"""The second race of the finals: what the first one said about each projection, put together.

Projections timed apart do not say what the whole op takes: one starts while the other ends, and few tokens leave most
of the device to whoever comes next. So the first race plays the search's best pair, and pairs that differ from it in
one projection. What a projection gains there is taken to add up, and the pairs that should then be fastest play the
second race against the best of the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tuner.config import Config
from tuner.playoff import levels
from tuner.problem import Projection

__all__ = ["Pair", "crossable", "second_race"]

Pair = dict[Projection, Config]

_KEPT, _NEW = 3, 5
_NEAR = 1.01
"""Who is further behind the first race's best, or is foretold to be, does not play the second one."""


def crossable(lead: Pair, pairs: Sequence[Pair]) -> bool:
    """Whether `pairs` tell about more than one projection of `lead` by itself."""
    return sum(any(_only(lead, pair) == projection for pair in pairs) for projection in lead) > 1


def second_race(lead: Pair, pairs: Sequence[Pair], samples: Sequence[Sequence[float]]) -> list[Pair]:
    """Pairs for a second race, the best of the first and the likely new ones; none where nothing new is likely.

    Args:
        lead: the search's best; where it has no samples nothing can be told.
        pairs, samples: the first race; a pair without samples did not run.
    """
    ran = [(pair, row) for pair, row in zip(pairs, samples, strict=True) if row]
    place = next((at for at, (pair, _) in enumerate(ran) if pair == lead), None)
    if place is None:
        return []
    found, _ = levels([row for _, row in ran])
    shares = [math.exp(level - found[place]) for level in found]
    gains: dict[Projection, dict[Config, float]] = {projection: {lead[projection]: 0.0} for projection in lead}
    for (pair, _), share in zip(ran, shares, strict=True):
        projection = _only(lead, pair)
        if projection is not None:
            gains[projection][pair[projection]] = share - 1
    told: list[tuple[float, int, Pair]] = []
    for each in itertools.product(*(gains[projection].items() for projection in lead)):
        pair = dict(zip(lead, (config for config, _ in each), strict=True))
        told.append((1 + sum(gain for _, gain in each), len(told), pair))
    bar = _NEAR * min(shares)
    known = [pair for pair, _ in ran]
    new = [pair for share, _, pair in sorted(told, key=lambda row: row[:2]) if share <= bar and pair not in known]
    if not new:
        return []
    best = [known[at] for at in sorted(range(len(ran)), key=lambda at: shares[at]) if shares[at] <= bar]
    return [*best[:_KEPT], *new[:_NEW]]


def _only(lead: Pair, pair: Pair) -> Projection | None:
    """The one projection in which `pair` differs from `lead`; None where it is none or several."""
    differ = [projection for projection in lead if pair[projection] != lead[projection]]
    return differ[0] if len(differ) == 1 else None
