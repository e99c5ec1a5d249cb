"""Two sweeps for a limited time: one completes a recorded sweep, the other begins where the best are likely to be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tuner.config import Config
from tuner.problem import Problem, Projection
from tuner.replay import Recorded
from tuner.strategies.base import Arena, Cut, Findings, Request, Runner, Task, Unit, choose

__all__ = ["HOW", "Likely", "Rest"]

_LEADERS, _AGAIN, _BEST, _REFINED = 10, 16, 4, 4
_REPS = (2, 4, 8)
_BAR = 1.5  # a config slower than this multiple of the best so far is timed once
_LAST_S, _LAST = 30.0, 0.3  # kept for timing the best again and refining them: so long, at most this share


HOW = (
    f"{_REPS[0]} samples of each config, one where it is above {_BAR} times the best so far; {_REPS[1]} more of the "
    f"best {_AGAIN}, {_REPS[2]} more of the best {_BEST}; what does not compile, fit or spills by what the compiler "
    "says is not launched and named"
)
"""How often a sweep timed what, for its record."""


@dataclass
class _Sweep:
    """`recorded`: swept before. `chosen`: configs by batch size and projection to judge."""

    recorded: Recorded
    chosen: dict[int, dict[str, Any]] = field(default_factory=dict)
    arenas: dict[int, Arena] = field(default_factory=dict, init=False)

    def _leading(self, count: int) -> list[tuple[int, Projection, Config]]:
        return [
            (size, p, config)
            for size, arena in self.arenas.items()
            for p in arena.projections
            for _, config in arena.ranked(p)[:count]
        ]

    def _refined(self, task: Task) -> list[tuple[int, Projection, Config]]:
        """The best few tiles at every GROUP_SIZE_M."""
        axes = [axis for axis in task.space.refined if axis.name == "GROUP_SIZE_M"]
        found: list[tuple[int, Projection, Config]] = []
        for size, arena in self.arenas.items():
            for p in arena.projections:
                tiles = dict.fromkeys(config.without("GROUP_SIZE_M") for _, config in arena.ranked(p))
                best = itertools.islice(tiles, _REFINED)
                found += [(size, p, t.with_(GROUP_SIZE_M=v)) for t in best for axis in axes for v in axis.values]
        return found

    def _findings(self, task: Task, whole: bool) -> Findings:
        choices = {size: choice for size, arena in self.arenas.items() if (choice := choose(arena, 3)) is not None}
        asked = [(p, config) for config in task.candidates() for p in task.projections]
        cut = {} if whole else {size: Cut.of("", asked, arena) for size, arena in self.arenas.items()}
        return Findings(choices, self.arenas, cut)

    def _ask(
        self,
        task: Task,
        runner: Runner,
        wanted: list[tuple[int, Projection, Config]],
        rung: int,
        late: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether all of it was answered before the deadline."""
        fresh = [w for w in wanted if rung or not self.arenas[w[0]].seen(w[1], w[2])]
        runner.submit([Request(Unit(*w), rung, _REPS[rung], partial(self._bar, w[0], w[1])) for w in fresh])
        for _ in fresh:
            if task.deadline() or late():
                runner.cancel()
                return False
            outcome = runner.next()
            self.arenas[outcome.unit.batch_size].add([outcome])
        return True

    def _bar(self, size: int, projection: Projection) -> float | None:
        best = self.arenas[size].fastest(projection)
        return None if best is None else _BAR * best


class Rest(_Sweep):
    """Completes `recorded`, of the same kernel: what it lacks, and its leaders again, so all were timed alike."""

    name = "rest"

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Time the leaders and the chosen, then the rest by need of memory, then the best again and GROUP_SIZE_M."""
        self.arenas = {size: Arena(size, task.projections) for size in task.batch_sizes}
        before = {size: self.recorded.arena(size) for size in self.recorded.sizes}
        known = {(unit.projection, unit.config) for unit in (*self.recorded.times, *self.recorded.errors)}
        first = [
            (size, p, config)
            for size in task.batch_sizes
            for p in task.projections
            for config in self._first(before, size, p)
        ]
        tiles = sorted(task.candidates(), key=_footprint)
        both = [each for tile in tiles for each in (tile, tile.with_(USE_TMA=True))]
        rest = [
            (size, p, c) for c in both for p in task.projections if (p, c) not in known for size in task.batch_sizes
        ]
        whole = self._ask(task, runner, list(dict.fromkeys([*first, *rest])), 0)
        if whole:
            self._ask(task, runner, self._leading(_AGAIN), 1)
            self._ask(task, runner, self._leading(_BEST), 2)
        whole = self._ask(task, runner, self._refined(task), 0) and whole
        return self._findings(task, whole)

    def _first(self, before: dict[int, Arena], size: int, projection: Projection) -> list[Config]:
        chosen = [Config.of(config) for config in self.chosen.get(size, {}).get(projection, [])]
        leaders = [config for _, config in before[size].ranked(projection)[:_LEADERS]] if size in before else []
        return [*chosen, *leaders]


@dataclass
class Likely(_Sweep):
    """Sweeps from the likely to the unlikely for most of `seconds`, then times the best again and refines them.

    Over the same journal it goes on where it was cut off.

    Likely is what was chosen and what is one move from it, then the order in `recorded`: another dtype's sweep of the
    same shape. Under it everything that fits this problem comes at last, what needs little memory first.
    """

    seconds: float = 60.0
    name = "likely"

    def tune(self, task: Task, runner: Runner) -> Findings:
        """`complete` says whether all of it was reached."""
        began = time.monotonic()
        self.arenas = {size: Arena(size, task.projections) for size in task.batch_sizes}
        wanted = list(dict.fromkeys([*self._near(task), *self._ranked(task), *self._all(task)]))
        until = began + self.seconds - min(_LAST_S, _LAST * self.seconds)
        whole = self._ask(task, runner, wanted, 0, lambda: time.monotonic() > until)
        again = self._ask(task, runner, self._leading(_AGAIN), 1)
        refined = again and self._ask(task, runner, self._refined(task), 0)
        if refined:
            self._ask(task, runner, self._leading(_BEST), 2)
        return self._findings(task, whole and refined)

    def _near(self, task: Task) -> list[tuple[int, Projection, Config]]:
        out = []
        for size in task.batch_sizes:
            for p in task.projections:
                chosen = [Config.of(config) for config in self.chosen.get(size, {}).get(p, [])]
                bases = [_plain(config) for config in chosen]
                moved = [m for base in dict.fromkeys(bases) for m in task.space.moves(base, task.problem)]
                out += [(size, p, config) for config in [*chosen, *_both(task.problem, task, [*bases, *moved])]]
        return out

    def _ranked(self, task: Task) -> list[tuple[int, Projection, Config]]:
        """In turns: the best of every batch size and projection before the second best of any."""
        rows = []
        for size in task.batch_sizes:
            arena = self.recorded.arena(size)
            for p in task.projections:
                ranked = [_plain(config) for _, config in arena.ranked(p)]
                rows.append([(size, p, c) for c in _both(task.problem, task, list(dict.fromkeys(ranked)))])
        return [each for turn in itertools.zip_longest(*rows) for each in turn if each is not None]

    def _all(self, task: Task) -> list[tuple[int, Projection, Config]]:
        tiles = _both(task.problem, task, sorted(task.candidates(), key=_footprint))
        return [(size, p, config) for config in tiles for p in task.projections for size in task.batch_sizes]


def _plain(config: Config) -> Config:
    return config.without("USE_TMA").with_(GROUP_SIZE_M=1)


def _both(problem: Problem, task: Task, tiles: list[Config]) -> list[Config]:
    """With descriptors and without, as far as the space has them."""
    known = [tile for tile in tiles if task.space.allows(tile, problem)]
    return [each for tile in known for each in (tile, tile.with_(USE_TMA=True))] if task.space.has_tma else known


def _footprint(config: Config) -> tuple[int, Config]:
    rows = config.block_m + config.integer("BLOCK_SIZE_N")
    return rows * config.integer("BLOCK_SIZE_K") * config.integer("num_stages", 1), config
