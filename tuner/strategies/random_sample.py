"""A seeded random sample of the space: what any cleverness has to beat."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tuner.config import Config
from tuner.strategies.base import Arena, Choice, Cut, Findings, Request, Runner, Task, Unit, choose, measure

__all__ = ["RandomSample"]


class RandomSample:
    """`count` random configs per batch size, and the default, which is measured however late it is."""

    name = "random"

    def __init__(self, count: int = 60) -> None:
        self.count = count

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size on its own sample."""
        arenas: dict[int, Arena] = {}
        choices: dict[int, Choice] = {}
        cut: dict[int, Cut] = {}
        pool = task.candidates()
        for size in task.batch_sizes:
            picks = random.Random(f"{task.seed} {size}").sample(pool, min(self.count, len(pool)))  # noqa: S311
            first, *others = dict.fromkeys([task.default(size), *picks])
            arena = arenas[size] = Arena(size, task.projections)
            arena.add(measure(runner, _requests(task, size, [first])))
            if not _in_time(task, runner, arena, _requests(task, size, others)):
                wanted = [(projection, config) for projection in task.projections for config in (first, *others)]
                cut[size] = Cut.of("", wanted, arena)
            choice = choose(arena, task.effort.finals)
            if choice is not None:
                choices[size] = choice
            task.report("sampled", size, arena)
        return Findings(choices, arenas, cut)


def _requests(task: Task, size: int, configs: Sequence[Config]) -> list[Request]:
    units = [Unit(size, projection, config) for config in configs for projection in task.projections]
    return [Request(unit, 0, task.effort.reps[0]) for unit in units]


def _in_time(task: Task, runner: Runner, arena: Arena, requests: Sequence[Request]) -> bool:
    """Measure all of it; False where the deadline came first and something runs without the rest."""

    def late() -> bool:
        return arena.joint() is not None and task.deadline()

    if requests and late():
        return False
    runner.submit(requests)
    for left in reversed(range(len(requests))):
        arena.add([runner.next()])
        if left and late():
            runner.cancel()
            return False
    return True
