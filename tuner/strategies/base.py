"""What a strategy sees: units to measure, a runner that measures them, and an arena that says who is winning.

A strategy is deterministic given its outcomes. That is what makes a tuning resumable: after a crash the strategy is
run again from the start over a journal, and every outcome that the journal holds is returned without measuring.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tuner.config import Config
from tuner.effort import Effort
from tuner.prior import OwnTiles, Prior
from tuner.problem import Problem, Projection
from tuner.spaces import Space

__all__ = [
    "ERRORS",
    "Arena",
    "Choice",
    "Cut",
    "ErrorClass",
    "Findings",
    "Outcome",
    "Request",
    "Runner",
    "Strategy",
    "Task",
    "Unit",
    "choose",
    "measure",
]

ErrorClass = Literal[
    "compile-failed",
    "compile-timeout",
    "compile-crashed",
    "over-shared",
    "over-tensor-memory",
    "over-threads",
    "spills",
    "wrong-result",
    "nondeterministic",
    "out-of-memory",
    "exception",
    "timeout",
    "crashed",
    "illegal-access",
    "blocklisted",
]
RIVAL = 1.08
"""Another BLOCK_SIZE_M within this multiple of the best may be the better one: projections timed apart do not say what
the whole op takes with its own sorting and padding (up to 5 % off on an H200)."""

ERRORS: frozenset[str] = frozenset(ErrorClass.__args__)  # type: ignore[attr-defined]


@dataclass(frozen=True, order=True)
class Unit:
    """One thing to time: a config of one projection at one batch size."""

    batch_size: int
    projection: Projection
    config: Config

    def spell(self) -> str:
        """Unique text, used in journals and messages."""
        return f"{self.batch_size} {self.projection} {self.config.spell()}"


def _no_bar() -> float | None:
    return None


@dataclass(frozen=True)
class Request:
    """Measure `unit` with `reps` replays; `rung` tells repeats apart.

    `bar` is asked when the measurement begins: after a first replay above it (microseconds) there is no second one.
    """

    unit: Unit
    rung: int
    reps: int
    bar: Callable[[], float | None] = field(default=_no_bar, compare=False, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What came of a request: samples in microseconds, or an error class with its reason."""

    unit: Unit
    rung: int
    samples_us: tuple[float, ...] = ()
    error: ErrorClass | None = None
    reason: str = ""

    @property
    def median_us(self) -> float | None:
        """Median of the samples; None where there are none."""
        return statistics.median(self.samples_us) if self.samples_us else None


class Runner(Protocol):
    """Whoever can answer requests: a live device, a recorded journal, or either behind a journal."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on. Whatever they need beforehand, such as compiling, begins now."""

    def next(self) -> Outcome:
        """The answer to one of the submitted requests, in whatever order they become ready.

        A request that fails is an outcome with an error, never an exception. LookupError where nothing is submitted.
        """

    def cancel(self) -> None:
        """Forget all requests that were not answered."""


def measure(runner: Runner, requests: Sequence[Request]) -> list[Outcome]:
    """Answers to requests in their order, from a runner that has nothing else to do."""
    runner.submit(requests)
    answers: dict[tuple[Unit, int], Outcome] = {}
    for _ in requests:
        outcome = runner.next()
        answers[outcome.unit, outcome.rung] = outcome
    return [answers[request.unit, request.rung] for request in requests]


Report = Callable[[str, int, "Arena | None"], None]


def _silent(stage: str, batch_size: int, arena: Arena | None) -> None:
    del stage, batch_size, arena


@dataclass(frozen=True)
class Task:
    """A tuning to do. `default` gives the config used where no file answers, by batch size.

    `descriptors_first`: this kernel is usually better off with descriptor loads on this device, so candidates start
    with them and the best are tried without, instead of the other way round. `own`: what our own kernels have
    beyond the space, for every projection.
    """

    problem: Problem
    batch_sizes: tuple[int, ...]
    space: Space
    effort: Effort
    default: Callable[[int], Config]
    prior: Prior | None = None
    seed: int = 0
    report: Report = _silent
    deadline: Callable[[], bool] = lambda: False
    seeds: tuple[Config, ...] = field(default=())
    only: tuple[Projection, ...] = ()
    descriptors_first: bool = False
    own: tuple[OwnTiles, ...] = ()

    def beyond(self, config: Config) -> bool:
        """Whether a config is one of our kernels' beyond the space, with no neighbours in it."""
        return any(config in entry.configs for entry in self.own)

    def beyond_at(self, batch_size: int) -> list[Config]:
        """The configs beyond the space that are tried at a batch size."""
        return [config for entry in self.own if batch_size <= entry.up_to for config in entry.configs]

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The kernels that are timed: all of the op's, unless a recording holds fewer (`only`)."""
        return self.only or self.problem.projections

    def candidates(self) -> list[Config]:
        """The whole space at this problem."""
        return self.space.configs(self.problem)


class Arena:
    """All times of one batch size, and the best pair: projections share one sorting, so they share BLOCK_SIZE_M."""

    def __init__(self, batch_size: int, projections: tuple[Projection, ...]) -> None:
        self.batch_size = batch_size
        self.projections = projections
        self.samples: dict[tuple[Projection, Config], list[float]] = {}
        self.errors: dict[tuple[Projection, Config], ErrorClass] = {}
        self._median: dict[tuple[Projection, Config], float] = {}

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Take outcomes in; an error removes the config for good."""
        for outcome in outcomes:
            at = (outcome.unit.projection, outcome.unit.config)
            if outcome.error is not None:
                self.errors[at] = outcome.error
                self.samples.pop(at, None)
                self._median.pop(at, None)
            elif at not in self.errors:
                self.samples.setdefault(at, []).extend(outcome.samples_us)
                # The lower one of an even number: a replay after a pause is slower, and never faster.
                self._median[at] = statistics.median_low(self.samples[at])

    def time(self, projection: Projection, config: Config) -> float | None:
        """Median of all samples, or None."""
        return self._median.get((projection, config))

    def times(self, projection: Projection) -> list[tuple[Config, float]]:
        """Every config of one projection with its time, in the order they were first measured."""
        return [(config, time) for (name, config), time in self._median.items() if name == projection]

    def fastest(self, projection: Projection) -> float | None:
        """The best time of one projection, whatever its BLOCK_SIZE_M; None where nothing ran."""
        return min((time for (name, _), time in self._median.items() if name == projection), default=None)

    def seen(self, projection: Projection, config: Config) -> bool:
        """Whether this config was tried here, successfully or not."""
        at = (projection, config)
        return at in self.samples or at in self.errors

    def best_in(self, projection: Projection) -> dict[int, tuple[float, Config]]:
        """The fastest config per BLOCK_SIZE_M."""
        best: dict[int, tuple[float, Config]] = {}
        for (name, config), time in self._median.items():
            if name == projection and (config.block_m not in best or (time, config) < best[config.block_m]):
                best[config.block_m] = (time, config)
        return best

    def joint(self) -> tuple[float, dict[Projection, Config]] | None:
        """The fastest choice for all projections together; None while a projection has nothing."""
        tables = {projection: self.best_in(projection) for projection in self.projections}
        common = set.intersection(*(set(table) for table in tables.values()))
        if not common:
            return None
        block = min(common, key=lambda b: (sum(tables[p][b][0] for p in self.projections), b))
        return sum(tables[p][block][0] for p in self.projections), {p: tables[p][block][1] for p in self.projections}

    def ranked(self, projection: Projection) -> list[tuple[float, Config]]:
        """Configs by joint score: own time plus the best that the other projections reach at this BLOCK_SIZE_M."""
        others = [self.best_in(p) for p in self.projections if p != projection]
        rows = []
        for (name, config), time in self._median.items():
            if name == projection and all(config.block_m in table for table in others):
                rows.append((time + sum(table[config.block_m][0] for table in others), config))
        return sorted(rows)


@dataclass(frozen=True)
class Choice:
    """What one batch size settled on: a config per projection, the summed time, and who plays the finals (it too)."""

    batch_size: int
    configs: dict[Projection, Config]
    time_us: float
    contenders: tuple[dict[Projection, Config], ...] = ()


@dataclass(frozen=True)
class Cut:
    """How far the search of one batch size had come when the deadline ended it.

    Attributes:
        stage: the last one that it had come to; empty before the first.
        asked: candidates of each projection that it had asked for. What it would have asked for next nobody knows.
        measured: how many of those were answered.
    """

    stage: str
    asked: dict[Projection, int]
    measured: dict[Projection, int]

    @staticmethod
    def of(stage: str, asked: Collection[tuple[Projection, Config]], arena: Arena) -> Cut:
        """Count what was asked for and what `arena` has of it."""
        counts = [
            {p: sum(q == p for q, _ in found) for p in arena.projections}
            for found in (asked, [*arena.samples, *arena.errors])
        ]
        return Cut(stage, *counts)


@dataclass(frozen=True)
class Findings:
    """The end of a search. `evaluations` counts distinct (unit) measurements, `arenas` holds every time.

    `cut` has the batch sizes whose search the deadline ended before it was through.
    """

    choices: dict[int, Choice]
    arenas: dict[int, Arena]
    cut: dict[int, Cut] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether no batch size was cut short."""
        return not self.cut

    @property
    def evaluations(self) -> int:
        """Distinct configs tried, over all batch sizes and projections."""
        return sum(len(arena.samples) + len(arena.errors) for arena in self.arenas.values())


class Strategy(Protocol):
    """A way to search."""

    name: str

    def tune(self, task: Task, runner: Runner) -> Findings:
        """Search all batch sizes of the task."""


def choose(arena: Arena, finals: int, refined: Collection[str] = (), more: int = 0) -> Choice | None:
    """The arena's winner, and its contenders: `finals` choices for all projections together, best first.

    Choices that differ in the `refined` axes alone are one tile to the finals while other tiles are nearly as good.
    Half as many more are of another BLOCK_SIZE_M where one comes near, and `more` are the next best, whatever they are.
    """
    best = arena.joint()
    if best is None:
        return None
    pools: dict[int, dict[Projection, list[tuple[float, Config]]]] = {}
    for projection in arena.projections:
        for config, time in arena.times(projection):
            pools.setdefault(config.block_m, {}).setdefault(projection, []).append((time, config))
    rows: list[_Row] = []
    for pool in pools.values():
        if len(pool) == len(arena.projections):
            few = [_few(sorted(pool[projection]), finals, refined) for projection in arena.projections]
            rows += [(sum(t for t, _ in each), tuple(c for _, c in each)) for each in itertools.product(*few)]
    found = _contenders(sorted(rows), finals, refined, more)
    return Choice(
        arena.batch_size, best[1], best[0],
        tuple(dict(zip(arena.projections, configs, strict=True)) for _, configs in found),
    )  # fmt: skip


_Row = tuple[float, tuple[Config, ...]]
_NEARLY = 1.03


def _few(timed: Sequence[tuple[float, Config]], count: int, refined: Collection[str]) -> list[tuple[float, Config]]:
    """The best `count`, and the best of as many tiles."""
    tiles: dict[Config, tuple[float, Config]] = {}
    for time, config in timed:
        tiles.setdefault(config.without(*refined), (time, config))
    return list(dict.fromkeys([*timed[:count], *list(tiles.values())[:count]]))


def _contenders(rows: Sequence[_Row], count: int, refined: Collection[str], more: int) -> list[_Row]:
    """`count`: the best; then tiles nearly as good, each once, those first that differ from it in one projection; then
    whatever is fastest. Beside them, half as many of other BLOCK_SIZE_M that come near: the best of each, and what
    differs from it in one projection."""
    tiles: dict[tuple[Config, ...], _Row] = {}
    for row in rows:
        tiles.setdefault(tuple(config.without(*refined) for config in row[1]), row)
    leads: dict[int, _Row] = {}
    for row in tiles.values():
        if row[0] <= rows[0][0] * RIVAL:
            leads.setdefault(row[1][0].block_m, row)
    around: dict[int, list[_Row]] = {block: [] for block in leads}
    near = []
    for row in tiles.values():
        lead = leads.get(row[1][0].block_m)
        if lead is not None and row[0] <= lead[0] * _NEARLY and _differ(row[1], lead[1], refined) == 1:
            around[row[1][0].block_m].append(row)
        if row[0] <= rows[0][0] * _NEARLY:
            near.append(row)
    best, *others = leads
    own = list(dict.fromkeys([rows[0], *around[best], *near, *rows]))[:count]
    rivals = [*(leads[block] for block in others), *sorted(row for block in others for row in around[block])]
    rest = [row for row in near if row not in own][:more]
    return sorted({*own, *rest, *rivals[: count // 2]})


def _differ(some: tuple[Config, ...], others: tuple[Config, ...], refined: Collection[str]) -> int:
    """In how many projections the tiles differ."""
    return sum(a.without(*refined) != b.without(*refined) for a, b in zip(some, others, strict=True))
