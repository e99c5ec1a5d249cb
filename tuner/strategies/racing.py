"""Racing by successive halving, in waves over all batch sizes.

First wave, batch sizes ascending: the default config, the prior's portfolio and the best of the neighbour below, on the
first projection; then on the others the tiles that did best there. Second wave: descriptor loads (USE_TMA), one-step
moves around the best and the best of both neighbours. Third wave: the refined axes and a better look at the best few.
A wave's configs are known before its first measurement, so that whoever compiles them ahead is never waited for long.

Without a prior the first batch size starts from a spread of the space and climbs by one-step moves, and each next one
from its neighbour: replayed on recorded sweeps, walking up this way beats setting out from anchors.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable

from tuner.config import Config
from tuner.problem import Projection
from tuner.strategies.base import Arena, Choice, Findings, Outcome, Request, Runner, Task, Unit, choose

__all__ = ["Racing"]

_RUNG = {"tma": 10, "moves": 20, "refine": 40, "probe": 60}
_CLIMBERS = 2
_SPREAD = 20
_GROUP = 8

Wanted = dict[Projection, list[Config]]


class Racing:
    """The default strategy; see the module."""

    name = "racing"

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size; stops between batch sizes when the task's deadline says so."""
        races = {size: _Race(task, runner, size) for size in sorted(task.batch_sizes)}
        runner.prepare([unit for race in races.values() for unit in race.units(race.first())])
        waves: list[Callable[[_Race], None]] = [
            lambda race: race.lead(races),
            lambda race: race.follow(),
            lambda race: race.vary(races),
            lambda race: race.settle(),
        ]
        complete = True
        for number, wave in enumerate(waves):
            if number:
                runner.prepare([unit for race in races.values() for unit in race.units(race.ahead(number, races))])
            for race in races.values():
                if number and task.deadline():
                    complete = False
                    break
                wave(race)
                task.report(("led", "followed", "varied", "settled")[number], race.size, race.arena)
        choices: dict[int, Choice] = {}
        for size, race in races.items():
            choice = choose(race.arena, task.effort.finals)
            if choice is not None:
                choices[size] = choice
        return Findings(choices, {size: race.arena for size, race in races.items()}, complete)


class _Race:
    """One batch size."""

    def __init__(self, task: Task, runner: Runner, size: int) -> None:
        self.task, self.runner, self.size = task, runner, size
        self.arena = Arena(size, task.projections)
        self.effort, self.space, self.problem = task.effort, task.space, task.problem
        self._launch_only = task.effort.reach == "launch" and task.prior is not None
        self.random = random.Random(f"{task.seed} {size}")  # noqa: S311

    def units(self, wanted: Wanted) -> list[Unit]:
        """As units of this batch size."""
        return [Unit(self.size, projection, config) for projection, configs in wanted.items() for config in configs]

    def first(self) -> Wanted:
        """What the first projection starts from, as far as it is known before anything is measured."""
        configs = self.starters({})
        return dict.fromkeys(self.task.projections[: 1 if self.effort.follow is not None else None], configs)

    def ahead(self, wave: int, races: dict[int, _Race]) -> Wanted:
        """What a wave is going to ask for."""
        if wave == 1:
            return self._followers()
        if wave == 2:
            return _merge(self._descriptors(), self._moves(self.effort.climbers), self._both_neighbours(races))
        return self._refinements()

    def lead(self, races: dict[int, _Race]) -> None:
        """First wave: the first projection (all of them where nothing is followed), and the climb without a prior."""
        count = 1 if self.effort.follow is not None else len(self.task.projections)
        configs = self.starters(races)
        self._measure(dict.fromkeys(self.task.projections[:count], configs), 0, self.effort.reps[0])
        if self.task.prior is None and self.effort.portfolio is not None:
            self._climb(max(2, self.effort.moves * 2), _CLIMBERS)

    def follow(self) -> None:
        """The other projections, on the tiles that led."""
        self._measure(self._followers(), 0, self.effort.reps[0])

    def vary(self, races: dict[int, _Race]) -> None:
        """Second wave."""
        self._measure(self._both_neighbours(races), 0, self.effort.reps[0])
        self._measure(self._descriptors(), _RUNG["tma"], self.effort.reps[0])
        self._climb(self.effort.moves, self.effort.climbers)
        self._probe()

    def settle(self) -> None:
        """Third wave."""
        self._measure(self._refinements(), _RUNG["refine"], self.effort.reps[0])
        for rung, keep in enumerate(self.effort.keep, start=1):
            self._measure(self._leaders(keep), rung, self.effort.reps[rung], again=True)

    def starters(self, races: dict[int, _Race]) -> list[Config]:
        """The default, what the neighbour below liked, and the portfolio or the whole space."""
        default = self.task.default(self.size)
        found: list[Config] = [self.space.complete(default) or default]
        if self.effort.portfolio is None:
            found += self.task.candidates()
        else:
            found += self._liked(races, -1)
            found += self._from_prior(self.effort.portfolio, bool(races))
        found += list(self.task.seeds)
        allowed = [config for config in dict.fromkeys(found) if self.space.allows(config, self.problem)]
        return list(dict.fromkeys([found[0], *map(self._first_way, allowed)]))

    def _first_way(self, config: Config) -> Config:
        """With descriptor loads where that is the likelier way."""
        return config.with_(USE_TMA=True) if self.task.descriptors_first and self.space.has_tma else config

    def _from_prior(self, limit: int, walking: bool) -> list[Config]:
        if self.task.prior is None:
            return self._spread() if not walking or self.size == min(self.task.batch_sizes) else []
        ranked = self.task.prior.ranked(self.problem.file_dtype, self.problem.block_shape, self.size, limit=4 * limit)
        own = [self.space.complete(tile) for tile in ranked]
        return list(dict.fromkeys(c for c in own if c is not None and self.space.allows(c, self.problem)))[:limit]

    def _spread(self) -> list[Config]:
        """A start where nothing is known: every BLOCK_SIZE_M and N at middling other values, deterministically."""
        tiles: dict[tuple[int, int], list[Config]] = {}
        for config in self.task.candidates():
            tiles.setdefault((config.block_m, config.integer("BLOCK_SIZE_N")), []).append(config)
        return [group[len(group) // 2] for _, group in sorted(tiles.items())][:_SPREAD]

    def _liked(self, races: dict[int, _Race], side: int) -> list[Config]:
        """Best tiles of the nearest batch size on one side (-1 below, 1 above) that was measured."""
        sizes = [size for size in races if (size - self.size) * side > 0 and races[size].arena.samples]
        if not sizes:
            return []
        near = races[min(sizes, key=lambda size: abs(size - self.size))].arena
        count = self.effort.neighbours * (1 if self.task.prior is not None else 3)
        found: list[Config] = []
        for projection in self.task.projections:
            times = sorted((time, config) for config, time in near.times(projection))
            found += list(dict.fromkeys(self._base(config) for _, config in times))[:count]
        return found

    def _base(self, config: Config) -> Config:
        """The bare tile: no descriptors, refined axes at their first value."""
        return config.without("USE_TMA").with_(**{axis.name: axis.values[0] for axis in self.space.refined})

    def _both_neighbours(self, races: dict[int, _Race]) -> Wanted:
        if self.effort.portfolio is None:
            return {}
        liked = dict.fromkeys([*self._liked(races, -1), *self._liked(races, 1)])
        configs = [self._first_way(config) for config in liked if self.space.allows(config, self.problem)]
        return {p: [c for c in configs if not self.arena.seen(p, c)] for p in self.task.projections}

    def _followers(self) -> Wanted:
        """For every further projection: the default and the tiles that did best on the first."""
        limit = self.effort.follow
        if limit is None:
            return {}
        first, *others = self.task.projections
        default = self.task.default(self.size)
        best = [config for _, config in sorted((time, config) for config, time in self.arena.times(first))][:limit]
        configs = list(dict.fromkeys([self.space.complete(default) or default, *best]))
        return {projection: list(configs) for projection in others}

    def _descriptors(self) -> Wanted:
        if not self.space.has_tma or not self.effort.tma:
            return {}
        leaders = self._leaders(self.effort.tma)
        return {
            p: [c.without("USE_TMA") if c.tma else c.with_(USE_TMA=True) for c in configs]
            for p, configs in leaders.items()
        }

    def _moves(self, climbers: int) -> Wanted:
        if not self.effort.moves and self.task.prior is not None:
            return {}
        moved: Wanted = {}
        for projection in self.arena.projections:
            leaders = [config for _, config in self.arena.ranked(projection)[:climbers]]
            steps = [step for leader in leaders for step in self.space.moves(leader, self.problem, self._launch_only)]
            moved[projection] = [step for step in dict.fromkeys(steps) if not self.arena.seen(projection, step)]
        return moved

    def _climb(self, rounds: int, climbers: int) -> None:
        """One-step moves around the best few, as long as they find something better."""
        for turn in range(rounds):
            before = self.arena.joint()
            if before is None:
                self._measure(self._followers(), 0, self.effort.reps[0])
                before = self.arena.joint()
            moved = self._moves(climbers)
            if not any(moved.values()):
                return
            self._measure(moved, _RUNG["moves"] + turn, self.effort.reps[0])
            after = self.arena.joint()
            if before is not None and after is not None and after[0] >= before[0]:
                return

    def _refinements(self) -> Wanted:
        if not self.space.refined or not self.effort.refine:
            return {}
        refine = functools.partial(
            self.space.refinements, problem=self.problem, size=self.size, everywhere=self.effort.refine_all
        )
        return {
            p: [other for config in configs for other in refine(config)]
            for p, configs in self._leaders(self.effort.refine).items()
        }

    def _probe(self) -> None:
        """A few random configs; one that wins shows that the prior does not know this device, and widens the search."""
        if not self.effort.probes:
            return
        pool = self.task.candidates()
        picks = self.random.sample(pool, min(self.effort.probes, len(pool)))
        before = self.arena.joint()
        picks = [self._first_way(pick) for pick in picks]
        self._measure(dict.fromkeys(self.arena.projections, picks), _RUNG["probe"], self.effort.reps[0])
        after = self.arena.joint()
        if before is not None and after is not None and after[0] < 0.99 * before[0]:
            self._climb(4, _CLIMBERS)

    def _leaders(self, count: int) -> Wanted:
        return {p: [config for _, config in self.arena.ranked(p)[:count]] for p in self.arena.projections}

    def _measure(self, wanted: Wanted, rung: int, reps: int, *, again: bool = False) -> None:
        """Measure what was not tried yet, or (`again`) add samples to what was."""
        self.runner.prepare(self.units(wanted))
        for projection in self.arena.projections:
            configs = [c for c in wanted.get(projection, ()) if again or not self.arena.seen(projection, c)]
            for start in range(0, len(configs), _GROUP):
                # In small groups, so that the bar for giving up early follows the incumbent.
                best = min((time for time, _ in self.arena.best_in(projection).values()), default=None)
                bar = None if best is None else best * self.effort.abort
                units = [Unit(self.size, projection, config) for config in configs[start : start + _GROUP]]
                self.arena.add(self._run([Request(unit, rung, reps, bar) for unit in units]))

    def _run(self, requests: list[Request]) -> Iterable[Outcome]:
        return self.runner.measure(requests)


def _merge(*parts: Wanted) -> Wanted:
    merged: Wanted = {}
    for part in parts:
        for projection, configs in part.items():
            merged[projection] = list(dict.fromkeys([*merged.get(projection, []), *configs]))
    return merged
