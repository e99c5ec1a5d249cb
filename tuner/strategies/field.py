"""All races on one course: whichever request is ready is answered, and whichever race can go on goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.config import Config
from tuner.problem import Projection
from tuner.strategies.base import Arena, Request, Runner, Task

__all__ = ["Field", "Step", "Wait"]


@dataclass(frozen=True)
class Wait:
    """A race goes on when all races of these batch sizes have come to `stage` or ended."""

    sizes: Sequence[int]
    stage: int


Step = Sequence[Request] | Wait


class Contestant(Protocol):
    """What a race is to the field."""

    size: int
    stage: int
    arena: Arena

    def steps(self) -> Iterator[Step]:
        """Yields what the race needs before it can go on."""


class Field:
    """Drives races until all of them ended, or the task's deadline has come.

    What a race asks for depends on answers alone and not on their order, so that a search over a journal asks for the
    same again. `asked` are the candidates that each race asked for.
    """

    def __init__(self, task: Task, runner: Runner, races: Mapping[int, Contestant]) -> None:
        self.task, self.runner, self.races = task, runner, races
        self._steps = {size: race.steps() for size, race in races.items()}
        self._open: dict[int, int] = {}
        self._waiting: dict[int, Wait] = {}
        self._ended: set[int] = set()
        self._left: set[int] = set()
        self._late = False
        self.asked: dict[int, set[tuple[Projection, Config]]] = {size: set() for size in races}

    def run(self) -> list[int]:
        """Run to the end; the batch sizes whose races the deadline cut short."""
        for size in self.races:
            self._advance(size)
        while self._open:
            outcome = self.runner.next()
            size = outcome.unit.batch_size
            self.races[size].arena.add([outcome])
            self._open[size] -= 1
            if not self._open[size]:
                del self._open[size]
                self._advance(size)
            if self._is_late() and all(race.arena.joint() is not None for race in self.races.values()):
                self.runner.cancel()
                break
        return [size for size in self.races if size not in self._ended]

    def _is_late(self) -> bool:
        self._late = self._late or self.task.deadline()
        return self._late

    def _advance(self, size: int) -> None:
        """Let one race go on until it has asked for something, waits, or ends; then those that waited for it."""
        stage = self.races[size].stage
        self._move(size)
        if self.races[size].stage == stage and not self._over_for_good(size):
            return
        for other, wait in list(self._waiting.items()):
            if other in self._waiting and size in wait.sizes and self._over(wait):
                del self._waiting[other]
                self._advance(other)

    def _move(self, size: int) -> None:
        for step in self._steps[size]:
            if self._over(step) if isinstance(step, Wait) else not step:
                continue
            if self._is_late() and self.races[size].arena.joint() is not None:
                self._left.add(size)
            elif isinstance(step, Wait):
                self._waiting[size] = step
            else:
                self._open[size] = len(step)
                self.asked[size] |= {(request.unit.projection, request.unit.config) for request in step}
                self.runner.submit(step)
            return
        self._ended.add(size)

    def _over_for_good(self, size: int) -> bool:
        """Whether a race will come to no further stage: it ended, or was left because it is late."""
        return size in self._ended or size in self._left

    def _over(self, wait: Wait) -> bool:
        return all(self._over_for_good(size) or self.races[size].stage >= wait.stage for size in wait.sizes)
