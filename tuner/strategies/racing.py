"""Racing by successive halving: one race per batch size, all of them at once.

A race begins with the default config and the prior's portfolio on the first projection; then the others on the tiles
that did best there. Then come the best of both neighbouring batch sizes, descriptor loads (USE_TMA) and moves around
the best, and last the refined axes and a better look at the best few. Every step asks for all it needs at once, and
`tuner.strategies.field` measures whatever is compiled, of whichever race: nobody waits for the slowest compile but the
race that wants it.

Without a prior the first batch size starts from a spread of the space and climbs by one-step moves, and each next one
from its neighbour: replayed on recorded sweeps, walking up this way beats setting out from anchors. Every fourth looks
at the spread again, for under noise a walk stays on the tiles that few tokens like.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping

from tuner.config import Config
from tuner.problem import Projection
from tuner.strategies.base import RIVAL, Arena, Choice, Cut, Findings, Request, Runner, Task, Unit, choose
from tuner.strategies.field import Field, Step, Wait

__all__ = ["Race", "Racing"]

_RUNG = {"tma": 10, "moves": 20, "refine": 40, "probe": 60}
_CLIMBERS = 2
_ROUNDS = 1
_STEPS = 4
_SPREAD, _AGAIN = 20, 4
_NEARLY = 1.05
_SHORT_US = 50.0
FOUND, VARIED, SETTLED = 1, 2, 3
_STAGES = {FOUND: "found", VARIED: "varied", SETTLED: "settled"}

Wanted = dict[Projection, list[Config]]


class Racing:
    """The default strategy; see the module."""

    name = "racing"

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size; once the task's deadline says so, no race begins another step."""
        races: dict[int, Race] = {}
        for size in sorted(task.batch_sizes):
            races[size] = Race(task, races, size)
        course = Field(task, runner, races)
        cut = {size: _cut(races[size], course) for size in course.run()}
        choices: dict[int, Choice] = {}
        for size, race in races.items():
            best = race.arena.joint()
            more = task.effort.short if best is not None and best[0] < _SHORT_US else 0
            choice = choose(race.arena, task.effort.finals, [axis.name for axis in task.space.refined], more)
            if choice is not None:
                choices[size] = choice
        return Findings(choices, {size: race.arena for size, race in races.items()}, cut)


def _cut(race: Race, course: Field) -> Cut:
    return Cut.of(_STAGES.get(race.stage, ""), course.asked[race.size], race.arena)


class Race:
    """One batch size. `races` are all of them; `stage` says how far this one has come."""

    def __init__(self, task: Task, races: Mapping[int, Race], size: int) -> None:
        self.task, self.races, self.size = task, races, size
        self.arena = Arena(size, task.projections)
        self.stage = 0
        self.liked: list[Config] = []
        self.effort, self.space, self.problem = task.effort, task.space, task.problem
        self._launch_only = task.effort.reach == "launch" and task.prior is not None
        self.random = random.Random(f"{task.seed} {size}")  # noqa: S311

    def steps(self) -> Iterator[Step]:
        """The whole race: requests to answer before it goes on, and other races to wait for."""
        if self.task.prior is None and self.effort.portfolio is not None:
            yield from self._walk()
        else:
            yield self._asked(self._leaders_of_portfolio(), 0)
            yield self._asked(self._followers(), 0)
        yield self._asked(self._beyond(), 0)
        self._reach(FOUND)
        if self.effort.portfolio is not None:
            yield Wait(self._beside(), FOUND)
            yield self._asked(self._both_neighbours(), 0)
        yield self._asked(self._descriptors(), _RUNG["tma"])
        if self.task.prior is not None:
            yield from self._climb(self.effort.moves, self.effort.climbers)
        else:
            yield from self._climb(_ROUNDS, _CLIMBERS)
        yield from self._probe()
        self._reach(VARIED)
        yield self._asked(self._refinements(), _RUNG["refine"])
        for rung, keep in enumerate(self.effort.keep, start=1):
            yield self._asked(self._again(keep), rung, self.effort.reps[rung], again=True)
        self._reach(SETTLED)

    def _reach(self, stage: int) -> None:
        self.stage = stage
        if stage == FOUND:
            self.liked = self._best_tiles()
        self.task.report(_STAGES[stage], self.size, self.arena)

    def _beside(self) -> list[int]:
        sizes = sorted(self.races)
        at = sizes.index(self.size)
        return [sizes[place] for place in (at - 1, at + 1) if 0 <= place < len(sizes)]

    def _walk(self) -> Iterator[Step]:
        """Without a prior: start where the batch size below ended, and climb."""
        yield Wait([size for size in self._beside() if size < self.size], FOUND)
        spread = self._spread() if sorted(self.races).index(self.size) % _AGAIN == 0 else []
        default = self.task.default(self.size)
        found = [self.space.complete(default) or default, *self._liked(-1), *spread]
        count = 1 if self.effort.follow is not None else len(self.task.projections)
        yield self._asked(dict.fromkeys(self.task.projections[:count], self._allowed(found)), 0)
        yield from self._climb(_STEPS, _CLIMBERS)
        yield self._asked(self._followers(), 0)

    def _leaders_of_portfolio(self) -> Wanted:
        """The first projection's candidates (all projections' where nothing is followed)."""
        default = self.task.default(self.size)
        found: list[Config] = [self.space.complete(default) or default]
        if self.effort.portfolio is None or len(self.task.candidates()) <= self.effort.portfolio:
            # What needs least memory first: the last third does not fit, and a sweep that is cut short lost nothing.
            whole = sorted(self.task.candidates(), key=_footprint)
            both = self.space.has_tma and self.effort.tma >= len(whole)
            for config in whole:
                found += [config, config.with_(USE_TMA=True)] if both else [config]
            allowed = list(dict.fromkeys([found[0], *self.task.seeds, *found]))
        else:
            found += [*self._from_prior(self.effort.portfolio), *self.task.seeds]
            allowed = self._allowed(found)
        count = 1 if self.effort.follow is not None else len(self.task.projections)
        return dict.fromkeys(self.task.projections[:count], allowed)

    def _allowed(self, found: list[Config]) -> list[Config]:
        """The default as it is, and the others in the space, the likelier way."""
        allowed = [config for config in dict.fromkeys(found) if self.space.allows(config, self.problem)]
        return list(dict.fromkeys([found[0], *map(self._first_way, allowed)]))

    def _first_way(self, config: Config) -> Config:
        """With descriptor loads where that is the likelier way."""
        return config.with_(USE_TMA=True) if self.task.descriptors_first and self.space.has_tma else config

    def _from_prior(self, limit: int) -> list[Config]:
        assert self.task.prior is not None
        ranked = self.task.prior.ranked(self.problem.file_dtype, self.problem.block_shape, self.size, limit=4 * limit)
        own = [self.space.complete(tile) for tile in ranked]
        return list(dict.fromkeys(c for c in own if c is not None and self.space.allows(c, self.problem)))[:limit]

    def _spread(self) -> list[Config]:
        """A start where nothing is known: every BLOCK_SIZE_M and N at middling other values, deterministically."""
        tiles: dict[tuple[int, int], list[Config]] = {}
        for config in self.task.candidates():
            tiles.setdefault((config.block_m, config.integer("BLOCK_SIZE_N")), []).append(config)
        return [group[len(group) // 2] for _, group in sorted(tiles.items())][:_SPREAD]

    def _liked(self, side: int) -> list[Config]:
        """What the nearest batch size on one side (-1 below, 1 above) had found when it was first done."""
        sizes = [size for size in self.races if (size - self.size) * side > 0 and self.races[size].stage >= FOUND]
        if not sizes:
            return []
        return self.races[min(sizes, key=lambda size: abs(size - self.size))].liked

    def _best_tiles(self) -> list[Config]:
        """What neighbours are told: taken once, for how far a neighbour is meanwhile depends on what was compiled."""
        count = self.effort.neighbours * (1 if self.task.prior is not None else 3)
        found: list[Config] = []
        for projection in self.task.projections:
            times = sorted((time, config) for config, time in self.arena.times(projection))
            tiles = [self._base(config) for _, config in times if not self.task.beyond(config)]
            found += list(dict.fromkeys(tiles))[:count]
        return found

    def _base(self, config: Config) -> Config:
        """The bare tile: no descriptors, refined axes at their first value."""
        return config.without("USE_TMA").with_(**{axis.name: axis.values[0] for axis in self.space.refined})

    def _both_neighbours(self) -> Wanted:
        liked = dict.fromkeys([*self._liked(-1), *self._liked(1)])
        configs = [self._first_way(config) for config in liked if self.space.allows(config, self.problem)]
        return dict.fromkeys(self.task.projections, configs)

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

    def _beyond(self) -> Wanted:
        """What lies beyond the space, for every projection: such kernels gain most together."""
        return {projection: self.task.beyond_at(self.size) for projection in self.arena.projections}

    def _descriptors(self) -> Wanted:
        if not self.space.has_tma or not self.effort.tma:
            return {}
        leaders = self._leaders(self.effort.tma)
        return {
            p: [c.without("USE_TMA") if c.tma else c.with_(USE_TMA=True) for c in configs if not self.task.beyond(c)]
            for p, configs in leaders.items()
        }

    def _moves(self, climbers: int) -> Wanted:
        if not self.effort.moves and self.task.prior is not None:
            return {}
        moved: Wanted = {}
        for projection in self.arena.projections:
            leaders = self._climbing(projection, climbers)
            steps = [step for leader in leaders for step in self.space.moves(leader, self.problem, self._launch_only)]
            if self._launch_only:  # the tile of the best too, for a short portfolio may not lead there
                best = {leader.block_m: leader for leader in reversed(leaders)}.values()
                steps += [step for leader in best for step in self.space.reshaped(leader, self.problem)]
            moved[projection] = [step for step in dict.fromkeys(steps) if not self.arena.seen(projection, step)]
        return moved

    def _climbing(self, projection: Projection, climbers: int) -> list[Config]:
        """Who moves: the best, and that of another BLOCK_SIZE_M that comes near; without a prior those of each."""
        scored = self.arena.ranked(projection)
        if not scored:
            return []
        blocks = dict(reversed([(config.block_m, (time, config)) for time, config in scored]))
        first, *others = [config for _, config in scored]
        if self.task.prior is None:
            return [config for _, config in sorted(blocks.values())][:climbers]
        best = scored[0][0]
        rivals = [row for block, row in blocks.items() if block != first.block_m and row[0] <= best * RIVAL]
        return list(dict.fromkeys([first, *(config for _, config in sorted(rivals)[:1]), *others[: climbers - 1]]))

    def _climb(self, rounds: int, climbers: int) -> Iterator[Step]:
        """One-step moves around the best few, as long as they find something better.

        Without a prior nobody stops before all moves of the leaders are made: what led was lucky, and what is better
        does not show at once.
        """
        for turn in range(rounds):
            before = self.arena.joint()
            if before is None:
                yield self._asked(self._followers(), 0)
                before = self.arena.joint()
            moved = self._moves(climbers)
            if not any(moved.values()):
                return
            yield self._asked(moved, _RUNG["moves"] + turn)
            after = self.arena.joint()
            stays = before is not None and after is not None and after[0] >= before[0]
            if stays and self.task.prior is not None:
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

    def _probe(self) -> Iterator[Step]:
        """A few random configs; one that wins shows that the prior does not know this device, and widens the search."""
        if not self.effort.probes:
            return
        pool = self.task.candidates()
        picks = self.random.sample(pool, min(self.effort.probes, len(pool)))
        before = self.arena.joint()
        picks = [self._first_way(pick) for pick in picks]
        yield self._asked(dict.fromkeys(self.arena.projections, picks), _RUNG["probe"])
        after = self.arena.joint()
        if before is not None and after is not None and after[0] < 0.99 * before[0]:
            yield from self._climb(4, _CLIMBERS)

    def _again(self, count: int) -> Wanted:
        """Who gets more samples: the leaders, and seeds that are nearly as good, so that a sweep judges them fairly."""
        found = self._leaders(count)
        for p, configs in found.items():
            bar = (self.arena.fastest(p) or 0.0) * _NEARLY
            configs += [seed for seed in self.task.seeds if (self.arena.time(p, seed) or bar + 1) <= bar]
        return found

    def _leaders(self, count: int) -> Wanted:
        return {p: [config for _, config in self.arena.ranked(p)[:count]] for p in self.arena.projections}

    def _asked(self, wanted: Wanted, rung: int, reps: int | None = None, *, again: bool = False) -> list[Request]:
        """Requests for what was not tried yet, or (`again`) for more samples of what was."""
        rows = [[(p, config) for config in dict.fromkeys(wanted.get(p, ()))] for p in self.arena.projections]
        return [
            Request(Unit(self.size, p, config), rung, reps or self.effort.reps[0], functools.partial(self._bar, p))
            for p, config in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*rows)))
            if again or not self.arena.seen(p, config)
        ]

    def _bar(self, projection: Projection) -> float | None:
        """What is slower than this is not replayed again: it follows the incumbent."""
        best = self.arena.fastest(projection)
        return None if best is None else best * self.effort.abort


def _footprint(config: Config) -> tuple[int, Config]:
    rows = config.block_m + config.integer("BLOCK_SIZE_N")
    return rows * config.integer("BLOCK_SIZE_K") * config.integer("num_stages", 1), config
