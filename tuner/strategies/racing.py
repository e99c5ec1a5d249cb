"""Racing by successive halving, batch size after batch size, ascending.

Each batch size starts from the default config, the prior's portfolio and the best of its neighbour; a rung measures
all that is left a little better and keeps fewer. Descriptor loads (USE_TMA) and the refined axes are tried on the
best only. Without a prior the first batch size starts from a spread of the space and climbs by one-step moves, and
each next one from its neighbour: replayed on recorded sweeps, walking up this way beats setting out from anchors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from tuner.config import Config
from tuner.prior import grid_distance
from tuner.problem import Projection
from tuner.strategies.base import Arena, Choice, Findings, Outcome, Request, Runner, Task, Unit, choose

__all__ = ["Racing"]

_RUNG = {"tma": 10, "moves": 20, "refine": 40, "probe": 60}
_CLIMBERS = 3
_SPREAD = 20
_LIKELY = 6


class Racing:
    """The default strategy; see the module."""

    name = "racing"

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Tune every batch size; stops between batch sizes when the task's deadline says so."""
        arenas: dict[int, Arena] = {}
        choices: dict[int, Choice] = {}
        complete = True
        self._prepare(task, runner)
        for size in sorted(task.batch_sizes):
            if choices and task.deadline():
                complete = False
                break
            race = _Race(task, runner, size, arenas)
            race.run()
            arenas[size] = race.arena
            choice = choose(race.arena, task.effort.finals)
            if choice is not None:
                choices[size] = choice
            task.report("raced", size, race.arena)
        return Findings(choices, arenas, complete)

    def _prepare(self, task: Task, runner: Runner) -> None:
        """Let whoever compiles begin: what every batch size starts from, then what its best are likely tried as."""
        units: dict[Unit, None] = {}
        likely: dict[Unit, None] = {}
        for size in sorted(task.batch_sizes):
            starters = _Race(task, runner, size, {}).starters()
            for projection, configs in starters.items():
                units.update(dict.fromkeys(Unit(size, projection, config) for config in configs))
                for config in configs[: _LIKELY if task.effort.portfolio is not None else len(configs)]:
                    if task.space.has_tma and task.effort.tma:
                        likely[Unit(size, projection, config.with_(USE_TMA=True))] = None
        runner.prepare([*units, *likely])


class _Race:
    """One batch size."""

    def __init__(self, task: Task, runner: Runner, size: int, known: dict[int, Arena]) -> None:
        self.task, self.runner, self.size, self.known = task, runner, size, known
        self.arena = Arena(size, task.projections)
        self.effort = task.effort
        self.random = random.Random(f"{task.seed} {size}")  # noqa: S311

    def run(self) -> None:
        """All stages in order."""
        self._measure(self.starters(), 0, self.effort.reps[0])
        if self.task.prior is None and self.effort.portfolio is not None:
            self._climb(rounds=max(2, self.effort.moves * 2), climbers=_CLIMBERS)
        self._descriptors()
        for rung, keep in enumerate(self.effort.keep, start=1):
            self._measure(self._leaders(keep), rung, self.effort.reps[rung])
        self._climb(rounds=self.effort.moves, climbers=1)
        self._refine()
        self._probe()

    def starters(self) -> dict[Projection, list[Config]]:
        """The first candidates, the same tiles for every projection."""
        space, problem = self.task.space, self.task.problem
        default = space.complete(self.task.default(self.size))
        found: list[Config] = [self.task.default(self.size)] if default is None else [default]
        if self.effort.portfolio is None:
            found += self.task.candidates()
        else:
            found += self._from_neighbours()
            found += self._from_prior(self.effort.portfolio)
        found += list(self.task.seeds)
        allowed = [config for config in dict.fromkeys(found) if config == found[0] or space.allows(config, problem)]
        return {projection: list(allowed) for projection in self.task.projections}

    def _from_prior(self, limit: int) -> list[Config]:
        problem, space = self.task.problem, self.task.space
        if self.task.prior is None:
            return self._spread() if not self.known else []
        ranked = self.task.prior.ranked(problem.file_dtype, problem.block_shape, self.size, limit=4 * limit)
        own = [
            config for tile in ranked if (config := space.complete(tile)) is not None and space.allows(config, problem)
        ]
        return list(dict.fromkeys(own))[:limit]

    def _spread(self) -> list[Config]:
        """A start where nothing is known: every BLOCK_SIZE_M and N at middling other values, deterministically."""
        configs = self.task.candidates()
        tiles: dict[tuple[int, int], list[Config]] = {}
        for config in configs:
            tiles.setdefault((config.block_m, config.integer("BLOCK_SIZE_N")), []).append(config)
        return [group[len(group) // 2] for _, group in sorted(tiles.items())][:_SPREAD]

    def _from_neighbours(self) -> list[Config]:
        """The best of the batch sizes already tuned on either side (both sides when the prior is missing)."""
        below = [size for size in self.known if size < self.size]
        above = [size for size in self.known if size > self.size]
        near = ([max(below)] if below else []) + ([min(above)] if above else [])
        near.sort(key=lambda size: grid_distance(size, self.size))
        found: list[Config] = []
        for size in near:
            for projection in self.task.projections:
                ranked = [config.without("USE_TMA") for _, config in self.known[size].ranked(projection)]
                base = [self._at_base(config) for config in ranked]
                found += list(dict.fromkeys(base))[: self.effort.neighbours * (1 if self.task.prior else 2)]
        return found

    def _at_base(self, config: Config) -> Config:
        """The config with refined axes back at their first value, so that it is recognised as the same tile."""
        return config.with_(**{axis.name: axis.values[0] for axis in self.task.space.refined})

    def _climb(self, rounds: int, climbers: int) -> None:
        """One-step moves around the best few, as long as they find something better."""
        for turn in range(rounds):
            before = self.arena.joint()
            moved: dict[Projection, list[Config]] = {}
            for projection in self.arena.projections:
                leaders = [config for _, config in self.arena.ranked(projection)[:climbers]]
                steps = [step for leader in leaders for step in self.task.space.moves(leader, self.task.problem)]
                moved[projection] = [step for step in dict.fromkeys(steps) if not self.arena.seen(projection, step)]
            if not any(moved.values()):
                return
            self._measure(moved, _RUNG["moves"] + turn, self.effort.reps[0])
            after = self.arena.joint()
            if before is not None and after is not None and after[0] >= before[0]:
                return

    def _descriptors(self) -> None:
        """USE_TMA on the best few of each projection."""
        if not self.task.space.has_tma or not self.effort.tma:
            return
        wanted = {
            projection: [config.with_(USE_TMA=True) for config in self._leaders(self.effort.tma)[projection]]
            for projection in self.arena.projections
        }
        self._measure(wanted, _RUNG["tma"], self.effort.reps[0])

    def _refine(self) -> None:
        """Every value of the refined axes on the best few."""
        if not self.task.space.refined or not self.effort.refine:
            return
        leaders = self._leaders(self.effort.refine)
        wanted = {
            projection: [other for config in leaders[projection] for other in self.task.space.refinements(config)]
            for projection in self.arena.projections
        }
        self._measure(wanted, _RUNG["refine"], self.effort.reps[min(1, len(self.effort.reps) - 1)])

    def _probe(self) -> None:
        """A few random configs; one that wins shows that the prior does not know this device, and widens the search."""
        if not self.effort.probes:
            return
        pool = self.task.candidates()
        picks = self.random.sample(pool, min(self.effort.probes, len(pool)))
        before = self.arena.joint()
        self._measure(dict.fromkeys(self.arena.projections, picks), _RUNG["probe"], self.effort.reps[0])
        after = self.arena.joint()
        if before is not None and after is not None and after[0] < 0.99 * before[0]:
            self._climb(rounds=4, climbers=_CLIMBERS)

    def _leaders(self, count: int) -> dict[Projection, list[Config]]:
        return {p: [config for _, config in self.arena.ranked(p)[:count]] for p in self.arena.projections}

    def _measure(self, wanted: dict[Projection, list[Config]], rung: int, reps: int) -> None:
        """Measure, skipping what was already tried at this stage; repeats of a rung above 0 add samples."""
        repeated = 0 < rung < _RUNG["tma"]
        self.runner.prepare(
            [Unit(self.size, p, config) for p in self.arena.projections for config in wanted.get(p, ())]
        )
        for projection in self.arena.projections:
            requests = self._requests(projection, wanted.get(projection, ()), rung, reps, repeated=repeated)
            if requests:
                self.arena.add(self._run(requests))

    def _requests(self, projection: Projection, configs: Iterable[Config], rung: int, reps: int, *,
                  repeated: bool) -> list[Request]:  # fmt: skip
        best = min((time for time, _ in self.arena.best_in(projection).values()), default=None)
        abort = None if best is None else best * self.effort.abort
        return [
            Request(Unit(self.size, projection, config), rung, reps, abort)
            for config in configs
            if repeated or not self.arena.seen(projection, config)
        ]

    def _run(self, requests: list[Request]) -> list[Outcome]:
        """In small groups, so that the bar for giving up early follows the incumbent."""
        outcomes: list[Outcome] = []
        best: float | None = None
        for start in range(0, len(requests), 8):
            group = requests[start : start + 8]
            if best is not None:
                bar = best * self.effort.abort
                group = [
                    Request(r.unit, r.rung, r.reps, bar if r.abort_us is None else min(bar, r.abort_us)) for r in group
                ]
            done = self.runner.measure(group)
            outcomes += done
            times = [outcome.median_us for outcome in done if outcome.median_us is not None]
            best = min([*times, *([best] if best is not None else [])], default=None)
        return outcomes
