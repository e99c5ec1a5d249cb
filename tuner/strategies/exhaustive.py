"""Every config of the space, refined axes on the best four: the yardstick that other strategies are held against."""

from __future__ import annotations

from dataclasses import replace

from tuner.strategies.base import Findings, Runner, Task
from tuner.strategies.racing import Racing

__all__ = ["Exhaustive"]


class Exhaustive:
    """Racing whose first rung is the whole space; `tma` limits descriptor loads to the best few (0: all)."""

    name = "exhaustive"

    def __init__(self, tma: int = 0) -> None:
        self.tma = tma

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size over the whole space."""
        whole = replace(
            task.effort,
            portfolio=None,
            follow=None,
            neighbours=0,
            moves=0,
            probes=0,
            tma=self.tma or len(task.candidates()),
        )
        return Racing().tune(replace(task, effort=whole, prior=None), runner)
