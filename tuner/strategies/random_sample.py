"""A seeded random sample of the space: what any cleverness has to beat."""

from __future__ import annotations

import random

from tuner.strategies.base import Arena, Choice, Findings, Request, Runner, Task, Unit, choose, measure

__all__ = ["RandomSample"]


class RandomSample:
    """`count` random configs per batch size, and the default."""

    name = "random"

    def __init__(self, count: int = 60) -> None:
        self.count = count

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size on its own sample."""
        arenas: dict[int, Arena] = {}
        choices: dict[int, Choice] = {}
        pool = task.candidates()
        for size in task.batch_sizes:
            picks = random.Random(f"{task.seed} {size}").sample(pool, min(self.count, len(pool)))  # noqa: S311
            configs = list(dict.fromkeys([task.default(size), *picks]))
            arena = Arena(size, task.projections)
            for projection in task.projections:
                requests = [Request(Unit(size, projection, config), 0, task.effort.reps[0]) for config in configs]
                arena.add(measure(runner, requests))
            arenas[size] = arena
            choice = choose(arena, task.effort.finals)
            if choice is not None:
                choices[size] = choice
            task.report("sampled", size, arena)
        return Findings(choices, arenas)
