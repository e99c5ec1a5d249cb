"""Search strategies: each a module with one class, all over one runner interface, so that a replay can drive them."""

from __future__ import annotations

from moegate.errors import UsageError
from tuner.strategies.base import Strategy

__all__ = ["NAMES", "strategy"]

NAMES = ("racing", "exhaustive", "random")


def strategy(name: str, **options: int) -> Strategy:
    """The strategy called `name`; UsageError for an unknown one."""
    from tuner.strategies.exhaustive import Exhaustive
    from tuner.strategies.racing import Racing
    from tuner.strategies.random_sample import RandomSample

    if name == "racing":
        return Racing()
    if name == "exhaustive":
        return Exhaustive()
    if name == "random":
        return RandomSample(**options)
    raise UsageError(f"unknown strategy {name!r}", field="--strategy", fix=f"one of {', '.join(NAMES)}")
