"""The second race of the finals: what the first one said about each projection, put together.

Projections timed apart do not say what the whole op takes: one starts while the other ends, and few tokens leave most
of the device to whoever comes next. So the first race plays the search's best pair of each BLOCK_SIZE_M, and pairs that
differ from it in one projection. What a projection gains there is taken to add up, and the pairs that should then be
fastest play the second race against the best of the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from tuner.config import Config
from tuner.playoff import levels
from tuner.problem import Projection

__all__ = ["Pair", "Race", "crossable", "leads_of", "races", "second_race"]

Pair = dict[Projection, Config]
Race = Callable[[Sequence[Pair], int], list[list[float]]]
"""Times pairs over so many rounds: microseconds per pair, none for one that does not run."""

_KEPT, _NEW = 3, 5
_NEAR = 1.01
"""Who is further behind the first race's best, or is foretold to be, does not play the second one."""


def races(
    race: Race, contenders: Sequence[Pair], default: Pair, pairs: Sequence[Pair], rounds: int
) -> list[tuple[list[Pair], list[list[float]]]]:
    """One race of `pairs`, and of half as many rounds where a second one may follow; who played and the samples.

    `contenders` are the search's, sorted; the second race begins with the default where `pairs` have it.
    """
    leads = leads_of(contenders)
    crossed = crossable(leads, pairs)
    samples = race(pairs, rounds // 2 if crossed else rounds)
    played = [(list(pairs), samples)]
    if crossed and (second := [pair for pair in second_race(leads, pairs, samples) if pair != default]):
        again = [*(pair for pair in pairs if pair == default), *second]
        played.append((again, race(again, rounds)))
    return played


def leads_of(contenders: Sequence[Pair]) -> list[Pair]:
    """The first pair of each BLOCK_SIZE_M: where `contenders` are sorted, what the search holds to be its best."""
    found: dict[int, Pair] = {}
    for pair in contenders:
        found.setdefault(_block(pair), pair)
    return list(found.values())


def crossable(leads: Sequence[Pair], pairs: Sequence[Pair]) -> bool:
    """Whether `pairs` tell about more than one projection of a lead by itself."""
    return any(sum(any(_only(lead, pair) == p for pair in pairs) for p in lead) > 1 for lead in leads)


def second_race(leads: Sequence[Pair], pairs: Sequence[Pair], samples: Sequence[Sequence[float]]) -> list[Pair]:
    """Pairs for a second race, the best of the first and the likely new ones; none where nothing new is likely.

    Args:
        leads: the search's best; of one without samples nothing can be told.
        pairs, samples: the first race; a pair without samples did not run.
    """
    ran = [(pair, row) for pair, row in zip(pairs, samples, strict=True) if row]
    if not ran:
        return []
    found, _ = levels([row for _, row in ran])
    known, shares = [pair for pair, _ in ran], [math.exp(level - min(found)) for level in found]
    told = sorted(
        (each for lead in leads if lead in known for each in _told(lead, known, shares)), key=lambda each: each[0]
    )
    new = [pair for share, pair in told if share <= _NEAR and pair not in known]
    if not new:
        return []
    best = [known[at] for at in sorted(range(len(known)), key=lambda at: shares[at]) if shares[at] <= _NEAR]
    return [*best[:_KEPT], *new[:_NEW]]


def _told(lead: Pair, known: Sequence[Pair], shares: Sequence[float]) -> list[tuple[float, Pair]]:
    """Every combination of what was played around a lead, with the share of the best's time that it should take."""
    base = shares[known.index(lead)]
    gains: dict[Projection, dict[Config, float]] = {projection: {lead[projection]: 0.0} for projection in lead}
    for pair, share in zip(known, shares, strict=True):
        projection = _only(lead, pair)
        if projection is not None:
            gains[projection][pair[projection]] = share - base
    return [
        (base + sum(gain for _, gain in each), dict(zip(lead, (config for config, _ in each), strict=True)))
        for each in itertools.product(*(gains[projection].items() for projection in lead))
    ]


def _only(lead: Pair, pair: Pair) -> Projection | None:
    """The one projection in which `pair` differs from `lead`; None where it is none or several."""
    differ = [projection for projection in lead if pair[projection] != lead[projection]]
    return differ[0] if len(differ) == 1 and _block(pair) == _block(lead) else None


def _block(pair: Pair) -> int:
    return next(iter(pair.values())).block_m
