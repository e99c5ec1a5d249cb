"""The search spaces: axes and constraints as data, per op and vendor, with one reader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moegate.errors import UsageError
from tuner.config import Config, Scalar
from tuner.problem import Problem
from tuner.spaces.constraints import CONSTRAINTS, REFINED_WHEN

__all__ = ["Axis", "Space", "space_for"]

Role = Literal["search", "refine", "variant"]


@dataclass(frozen=True)
class Axis:
    """One parameter and its values.

    `search` axes span the space; a `refine` axis is fixed at its first value until the best few are known; a `variant`
    axis is a switch (USE_TMA) whose other values are tried on the best few and left out of the config where false.
    """

    name: str
    values: tuple[Scalar, ...]
    role: Role = "search"


@dataclass(frozen=True)
class Space:
    """All configs of one op on one vendor's devices, before anything is known about a shape."""

    op: str
    vendor: str
    axes: tuple[Axis, ...]
    constraints: tuple[str, ...] = ()
    source: str = ""

    def axis(self, name: str) -> Axis | None:
        """The axis of one parameter, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)

    @cached_property
    def refined(self) -> tuple[Axis, ...]:
        """Axes that are only tried on the best."""
        return tuple(axis for axis in self.axes if axis.role == "refine")

    @property
    def has_tma(self) -> bool:
        """Whether descriptor loads are a choice here."""
        return any(axis.name == "USE_TMA" and True in axis.values for axis in self.axes)

    def configs(self, problem: Problem) -> list[Config]:
        """Every config of the search axes that the constraints allow; refined axes at their first value."""
        searched = [axis for axis in self.axes if axis.role == "search"]
        base: dict[str, Scalar] = {axis.name: axis.values[0] for axis in self.refined}
        out = []
        for values in itertools.product(*(axis.values for axis in searched)):
            config = Config.of({**base, **dict(zip((a.name for a in searched), values, strict=True))})
            if self.allows(config, problem):
                out.append(config)
        return out

    def size(self, problem: Problem) -> int:
        """Number of configs, refined axes and variants counted in: what a full sweep of one projection would visit."""
        factor = 1
        for axis in self.axes:
            if axis.role != "search":
                factor *= len(axis.values)
        return len(self.configs(problem)) * factor

    def allows(self, config: Config, problem: Problem) -> bool:
        """Whether every constraint holds."""
        return all(CONSTRAINTS[name].holds(config, problem) for name in self.constraints)

    def complete(self, config: Config) -> Config | None:
        """A config from elsewhere made one of this space: unknown parameters go, missing ones get their first value.

        None where a value lies outside its axis.
        """
        values: dict[str, Scalar] = {}
        for axis in self.axes:
            value = config.get(axis.name)
            if axis.role == "variant":
                if value:
                    values[axis.name] = value
                continue
            if value is None or (axis.role == "refine" and value not in axis.values):
                value = axis.values[0]
            if value not in axis.values:
                return None
            values[axis.name] = value
        return Config.of(values)

    def moves(self, config: Config, problem: Problem, launch_only: bool = False) -> Iterator[Config]:
        """Configs near by: one step along a tile axis, anywhere along an axis of launch parameters, and trades.

        A trade makes the tile twice as long one way, and half as long another or a stage less deep: what it needs stays
        about the same, which single steps cannot do without passing through what is too large or too small.
        `launch_only` leaves the tile alone.
        """
        searched = [axis for axis in self.axes if axis.role == "search" and config.get(axis.name) in axis.values]
        if launch_only:
            searched = [axis for axis in searched if axis.name.startswith("num_")]
        for axis in searched:
            # Times are not smooth in the number of stages: 5 can win where 4 loses.
            steps = range(-len(axis.values), len(axis.values)) if axis.name.startswith("num_") else (-1, 1)
            for step in steps:
                yield from self._stepped(config, problem, (axis, step))
        tile = [axis for axis in searched if axis.name.startswith("BLOCK_")]
        for longer, shorter in itertools.permutations(tile, 2):
            yield from self._stepped(config, problem, (longer, 1), (shorter, -1))
        for longer, stages in itertools.product(tile, [axis for axis in searched if axis.name == "num_stages"]):
            yield from self._stepped(config, problem, (longer, 1), (stages, -1))

    def reshaped(self, config: Config, problem: Problem) -> Iterator[Config]:
        """A tile twice or half as wide or deep, with as many stages and with one less or more for the same bytes."""
        stages = self.axis("num_stages")
        staged = stages is not None and config.get("num_stages") in stages.values
        for axis in (self.axis("BLOCK_SIZE_K"), self.axis("BLOCK_SIZE_N")):
            if axis is None or config.get(axis.name) not in axis.values:
                continue
            for step in (1, -1):
                yield from self._stepped(config, problem, (axis, step))
                if staged and stages is not None:
                    yield from self._stepped(config, problem, (axis, step), (stages, -step))

    def _stepped(self, config: Config, problem: Problem, *steps: tuple[Axis, int]) -> Iterator[Config]:
        changes: dict[str, Scalar] = {}
        for axis, step in steps:
            at = axis.values.index(config[axis.name]) + step
            if not 0 <= at < len(axis.values) or not step:
                return
            changes[axis.name] = axis.values[at]
        moved = config.with_(**changes)
        if self.allows(moved, problem):
            yield moved

    def refinements(self, config: Config, problem: Problem, size: int, everywhere: bool = False) -> Iterator[Config]:
        """The same config at every other value of the refined axes that can matter at this batch size (or of all)."""
        axes = [
            axis
            for axis in self.refined
            if everywhere or axis.name not in REFINED_WHEN or REFINED_WHEN[axis.name](config, problem, size)
        ]
        for values in itertools.product(*(axis.values for axis in axes)):
            refined = config.with_(**dict(zip((axis.name for axis in axes), values, strict=True)))
            if refined != config:
                yield refined


def space_for(op: str, vendor: str) -> Space:
    """The space of `op` on `vendor` (`nvidia`, `amd`, `intel`, `cpu` = interpreted). UsageError where there is none."""
    from tuner.spaces.table import SPACES

    for space in SPACES:
        if (space.op, space.vendor) == (op, vendor):
            return space
    known = sorted({space.vendor for space in SPACES if space.op == op})
    raise UsageError(f"{op} has no search space on {vendor}", fix=f"known: {', '.join(known) or 'none'}")
