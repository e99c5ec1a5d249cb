"""Every budget of the search in one table: how wide, how often, how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moegate.errors import UsageError

__all__ = ["EFFORTS", "Effort", "effort"]


@dataclass(frozen=True)
class Effort:
    """How much work a tuning may do.

    Attributes:
        portfolio: candidates per batch size from the prior (`None`: the whole space).
        follow: candidates of every further projection: those whose tile did best in the first one, and its own
            neighbours'; `None` for all. Projections of one layer like the same tiles, and a compile costs more than a
            measurement.
        neighbours: best configs of each neighbouring batch size that are tried too.
        moves: rounds of moves around the best; 0 for none. climbers: how many of the best of each projection move.
        reach: which moves: `launch` (num_warps, num_stages, and BLOCK_SIZE_N and K of the best) or `all`.
        tma: candidates per projection that are also tried the other way: with descriptor loads, or without them where
            the kernel is better off with them.
        refine: candidates of each projection that get every value of the refined axes (GROUP_SIZE_M).
        refine_all: whether an axis is refined too where it should not matter (`tuner.spaces.constraints.REFINED_WHEN`):
            recorded sweeps have it win by up to 1.7 % at batch size 1 all the same.
        reps: replays of each rung; rung 0 covers all candidates, each next rung the best `keep` of the one before.
        keep: candidates that enter rung 1, 2, ...
        abort: a candidate slower than this multiple of the incumbent after its first replay is not replayed again.
        finals: choices (a config per projection) that meet the default in a fresh process.
        short: as many more, the next best by their sum, where the op is short: there the end of one kernel and the
            start of the next weigh most, so that no projection tells alone what it takes, and a round costs least.
        final_rounds: most interleaved rounds of the finals; whoever is clearly behind plays fewer.
        probes: random candidates per batch size that watch for what the prior does not know.
    """

    name: str
    portfolio: int | None
    follow: int | None
    neighbours: int
    moves: int
    climbers: int
    reach: Literal["launch", "all"]
    tma: int
    refine: int
    reps: tuple[int, ...]
    keep: tuple[int, ...]
    abort: float
    finals: int
    short: int
    final_rounds: int
    probes: int = 0
    refine_all: bool = True


EFFORTS: dict[str, Effort] = {
    "quick": Effort("quick", 24, 12, 4, 1, 2, "launch", 2, 1, (5, 12), (5,), 1.5, 14, 10, 64),
    "full": Effort("full", 40, 20, 3, 2, 4, "all", 6, 3, (5, 10, 20), (12, 6), 2.0, 24, 12, 200, 1),
    "exhaustive": Effort("exhaustive", None, None, 0, 0, 0, "all", 1_000_000, 4, (2, 4, 8), (16, 4), 1.5, 24, 12, 200),
}

# Under Triton's interpreter one call takes as long as thousands on a device and repeats within a few per cent.
INTERPRETED: dict[str, Effort] = {
    "quick": Effort("quick", None, None, 0, 0, 0, "all", 0, 0, (1, 2), (2,), 1.3, 1, 0, 3),
    "full": Effort("full", None, None, 0, 1, 1, "all", 0, 0, (2, 3), (3,), 1.5, 2, 0, 5),
    "exhaustive": Effort("exhaustive", None, None, 0, 0, 0, "all", 0, 0, (2, 3), (4,), 4.0, 2, 0, 5),
}


def effort(name: str, *, interpreted: bool = False) -> Effort:
    """The budget called `name`; UsageError for an unknown one."""
    table = INTERPRETED if interpreted else EFFORTS
    if name not in table:
        raise UsageError(f"unknown effort {name!r}", field="--effort", fix=f"one of {', '.join(table)}")
    return table[name]
