"""Completes a recorded sweep: times what it lacks, and its leaders once more, so that all of them were timed alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tuner.config import Config
from tuner.problem import Projection
from tuner.replay import Recorded
from tuner.strategies.base import Arena, Findings, Request, Runner, Task, Unit, choose

__all__ = ["Rest"]

_LEADERS, _AGAIN, _BEST, _REFINED = 10, 16, 4, 4
_REPS = (2, 4, 8)


@dataclass
class Rest:
    """`recorded`: swept before, with the same kernel. `chosen`: configs by batch size and projection to judge."""

    recorded: Recorded
    chosen: dict[int, dict[str, Any]] = field(default_factory=dict)
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
        groups = [axis for axis in task.space.refined if axis.name == "GROUP_SIZE_M"]
        refined = [
            (size, p, config.with_(GROUP_SIZE_M=value))
            for size, p, config in self._leading(_REFINED)
            for axis in groups
            for value in axis.values[1:]
        ]
        whole = self._ask(task, runner, refined, 0) and whole
        choices = {size: choice for size, arena in self.arenas.items() if (choice := choose(arena, 3)) is not None}
        return Findings(choices, self.arenas, whole)

    def _first(self, before: dict[int, Arena], size: int, projection: Projection) -> list[Config]:
        chosen = [Config.of(config) for config in self.chosen.get(size, {}).get(projection, [])]
        leaders = [config for _, config in before[size].ranked(projection)[:_LEADERS]] if size in before else []
        return [*chosen, *leaders]

    def _leading(self, count: int) -> list[tuple[int, Projection, Config]]:
        return [
            (size, p, config)
            for size, arena in self.arenas.items()
            for p in arena.projections
            for _, config in arena.ranked(p)[:count]
        ]

    def _ask(self, task: Task, runner: Runner, wanted: list[tuple[int, Projection, Config]], rung: int) -> bool:
        """Whether all of it was answered before the deadline."""
        fresh = [w for w in wanted if rung or not self.arenas[w[0]].seen(w[1], w[2])]
        runner.submit([Request(Unit(*w), rung, _REPS[rung], partial(self._bar, w[0], w[1])) for w in fresh])
        for _ in fresh:
            if task.deadline():
                runner.cancel()
                return False
            outcome = runner.next()
            self.arenas[outcome.unit.batch_size].add([outcome])
        return True

    def _bar(self, size: int, projection: Projection) -> float | None:
        best = self.arenas[size].fastest(projection)
        return None if best is None else 1.5 * best


def _footprint(config: Config) -> tuple[int, Config]:
    rows = config.block_m + config.integer("BLOCK_SIZE_N")
    return rows * config.integer("BLOCK_SIZE_K") * config.integer("num_stages", 1), config
