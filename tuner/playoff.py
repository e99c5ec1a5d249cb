"""Who of a few candidates is fastest: alternating rounds, in which whoever is clearly behind drops out.

A round times every candidate once, so what the machine does meanwhile (clocks, temperature) meets all of them alike.
Nothing here knows what is timed: a device, or a recording with noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

__all__ = ["FIRST", "Round", "levels", "play"]

Round = Callable[[Sequence[int]], Sequence[float]]
"""Times the candidates of these places once each, in this order; microseconds."""

FIRST = 8
"""Rounds before the first candidate may drop out, and between two such decisions."""

_BEHIND = 2.5  # a candidate drops out this many standard errors behind the leader
_NEAR = 0.002  # a difference below this share is worth no more rounds
_TRIM = 5  # the mean of a row leaves out a fifth at either end: a stray sample is none of the candidate's doing
_SWEEPS, _SETTLED = 8, 1e-6
_LEAST = 1e-9  # microseconds: what a clock too coarse for a call tells as nothing, which has no logarithm


def play(once: Round, count: int, rounds: int, *, drop: bool = True) -> list[list[float]]:
    """Samples of every candidate; row i holds one per round until candidate i dropped out, at most `rounds`.

    It ends early where one is left, or where those left differ by less than matters. Without `drop` all play to the
    end.
    """
    rows: list[list[float]] = [[] for _ in range(count)]
    alive = list(range(count))
    for turn in range(rounds):
        order = alive if turn % 2 == 0 else alive[::-1]
        for place, sample in zip(order, once(order), strict=True):
            rows[place].append(float(sample))
        if drop and (turn + 1) % FIRST == 0:
            alive, near = _left(rows, alive)
            if len(alive) == 1 or near:
                break
    return rows


def levels(rows: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """The log of every candidate's time, free of what whole rounds have in common, and the noise of one sample.

    Row i may end before others: each sample is taken as its candidate's level plus its round's. Rows are not empty.
    """
    logs = [[math.log(max(sample, _LEAST)) for sample in row] for row in rows]
    found = [_middle(row) for row in logs]
    common: list[float] = []
    for _ in range(_SWEEPS):
        common = [
            statistics.fmean(row[turn] - level for row, level in zip(logs, found, strict=True) if len(row) > turn)
            for turn in range(max(map(len, logs)))
        ]
        before, found = found, [_middle([x - c for x, c in zip(row, common, strict=False)]) for row in logs]
        if max(abs(a - b) for a, b in zip(before, found, strict=True)) < _SETTLED:
            break
    left = [
        (sample - shared - level) ** 2
        for row, level in zip(logs, found, strict=True)
        for sample, shared in zip(row, common, strict=False)
    ]
    return found, math.sqrt(sum(left) / max(1, len(left) - len(common) - len(rows) + 1))


def _left(rows: Sequence[Sequence[float]], alive: Sequence[int]) -> tuple[list[int], bool]:
    """Who is not clearly behind, and whether these are known to be as good as each other."""
    found, noise = levels(rows)
    best = min(alive, key=lambda place: found[place])
    error = noise * math.sqrt(2 / len(rows[best]))
    left = [place for place in alive if found[place] - found[best] <= _BEHIND * error]
    return left, all(found[place] - found[best] + _BEHIND * error <= _NEAR for place in left)


def _middle(row: Sequence[float]) -> float:
    ordered = sorted(row)
    cut = len(ordered) // _TRIM
    return statistics.fmean(ordered[cut : len(ordered) - cut])
