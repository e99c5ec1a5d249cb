"""In which order the launches of a cell run: ABBA blocks with a seeded flip per block.

A slow drift of the device (heat, clocks, a neighbour) cancels inside a block of two pairs, and the seeded flip keeps a
periodic disturbance from falling on the same arm every time. A schedule is a prefix of every longer one with the same
seed, so a stage that stops early has run exactly the schedule that it would have planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Order = Literal["AB", "BA"]

_BLOCKS: tuple[tuple[Order, Order], tuple[Order, Order]] = (("AB", "BA"), ("BA", "AB"))


@dataclass(frozen=True)
class Turn:
    """One launch of a schedule.

    pair: number of the pair, from 0. order: place of the launch in its stage, from 0. arm: name of the arm.
    """

    pair: int
    order: int
    arm: str


def schedule(pairs: int, seed: int | str) -> tuple[Order, ...]:
    """The order of each of `pairs` pairs: "AB" runs the baseline first.

    Two pairs form a block (ABBA, or BAAB when the block's coin says so); an odd last pair takes half a block.
    Raises ValueError for a negative number.
    """
    if pairs < 0:
        raise ValueError(f"the number of pairs cannot be negative: {pairs}")
    coin = Random(f"abba:{seed}")  # noqa: S311 - reproducible, not secret
    orders: list[Order] = []
    while len(orders) < pairs:
        orders.extend(_BLOCKS[coin.getrandbits(1)])
    return tuple(orders[:pairs])


def turns(pairs: int, seed: int | str, arms: Sequence[str]) -> tuple[Turn, ...]:
    """The launches of `pairs` pairs in the order in which they run; `arms` = (baseline, candidate).

    The two arms may have the same name (`aa: true`: the baseline against itself).
    """
    baseline, candidate = arms
    result: list[Turn] = []
    for pair, order in enumerate(schedule(pairs, seed)):
        for arm in (baseline, candidate) if order == "AB" else (candidate, baseline):
            result.append(Turn(pair=pair, order=len(result), arm=arm))
    return tuple(result)
