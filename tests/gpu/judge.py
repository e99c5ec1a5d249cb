"""Regret on one machine in one session: what tunings chose against the best of a sweep, timed again side by side.

A sweep times each of thousands of configs once or twice, on another machine at another time. Its smallest number is
then a lucky one, and whatever is held against it looks worse than it is. Here a batch size's pool is what the tunings
chose, the sweep's best tiles and the best few with whatever GROUP_SIZE_M, all timed in alternating rounds by one
process. A first short pass, which counts for nothing else, narrows the sweep's to eight: the best of a noisy sweep is
often not among its first eight, and a sum of projections does not say what the whole op takes. Then one half of the
rounds says which of the pool is the reference, the other half what the reference and the chosen take; and the halves
change places.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.config import Config
from tuner.crossed import Pair
from tuner.live import Live, LiveOptions, pool_size
from tuner.pipeline import interpreter_env
from tuner.playoff import levels
from tuner.problem import Problem, Projection
from tuner.replay import Recorded
from tuner.strategies.base import Request, Unit, choose

__all__ = ["Judged", "Pool", "Verdict", "judge", "overall", "pool_of", "verdict"]

TILES, FIELD, BEST = 16, 24, 8
REFINED = ("GROUP_SIZE_M",)
FIRST_ROUNDS, ROUNDS = 16, 40
_Z = 1.96
_COMPILE_S, _ASK_S = 30.0, 30.0

Ask = Callable[[int, Sequence[Pair], int], list[list[float]]]
"""Times pairs at a batch size in alternating rounds: samples per pair, one a round."""


@dataclass(frozen=True)
class Judged:
    """Regret (a fraction) with its 95 % interval and standard error."""

    regret: float
    low: float
    high: float
    error: float


@dataclass(frozen=True)
class Pool:
    """Who is timed at one batch size; `chosen` says which of them a tuning chose."""

    size: int
    pairs: tuple[Pair, ...]
    chosen: Mapping[str, int]


@dataclass(frozen=True)
class Verdict:
    """One batch size: `reference` are the places of the pool that the two halves picked."""

    size: int
    regrets: Mapping[str, Judged]
    reference: tuple[int, int]
    rounds: int


def pool_of(
    size: int, chosen: Mapping[str, Pair], recorded: Recorded | None, tiles: int = TILES, best: int = FIELD
) -> Pool:
    """What the tunings chose (each config once), the sweep's best `tiles`, as finals take them, and its `best`."""
    pairs: list[Pair] = []
    places: dict[str, int] = {}
    for name, pair in chosen.items():
        if pair not in pairs:
            pairs.append(pair)
        places[name] = pairs.index(pair)
    if recorded is not None and size in recorded.sizes:
        arena = recorded.arena(size)
        for found in (choose(arena, tiles, REFINED), choose(arena, best)):
            pairs += [pair for pair in (() if found is None else found.contenders) if pair not in pairs]
    return Pool(size, tuple(pairs), places)


def narrowed(pool: Pool, samples: Sequence[Sequence[float]], best: int = BEST) -> Pool:
    """The chosen, and whoever else was among the `best` fastest."""
    found, _ = levels(samples)
    fastest = sorted(range(len(found)), key=lambda place: found[place])[:best]
    return _only(pool, sorted({*pool.chosen.values(), *fastest}))


def _only(pool: Pool, places: Sequence[int]) -> Pool:
    chosen = {name: places.index(place) for name, place in pool.chosen.items() if place in places}
    return Pool(pool.size, tuple(pool.pairs[place] for place in places), chosen)


def verdict(pool: Pool, samples: Sequence[Sequence[float]]) -> Verdict:
    """Regrets of one batch size. Rounds come in twos of opposite order, so halves are made of every other two."""
    rounds = len(samples[0])
    halves = [[turn for turn in range(rounds) if turn // 2 % 2 == half] for half in (0, 1)]
    picked = []
    for half in halves:
        found, _ = levels([[row[turn] for turn in half] for row in samples])
        picked.append(min(range(len(found)), key=lambda place: found[place]))
    out = {}
    for name, place in pool.chosen.items():
        ratios = [
            math.log(samples[place][turn] / samples[reference][turn])
            for reference, half in zip(picked, reversed(halves), strict=True)
            for turn in half
        ]
        out[name] = _judged(statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5)
    return Verdict(pool.size, out, (picked[0], picked[1]), rounds)


def overall(verdicts: Sequence[Verdict], name: str) -> tuple[Judged, int]:
    """The mean regret of one tuning over its batch sizes, and the size of the worst."""
    rows = [(v.size, v.regrets[name]) for v in verdicts if name in v.regrets]
    error = math.sqrt(sum(judged.error**2 for _, judged in rows)) / len(rows)
    mean = statistics.fmean(judged.regret for _, judged in rows)
    worst = max(rows, key=lambda row: row[1].regret)[0]
    return Judged(mean, mean - _Z * error, mean + _Z * error, error), worst


def _judged(log: float, error: float) -> Judged:
    return Judged(math.expm1(log), math.expm1(log - _Z * error), math.expm1(log + _Z * error), error)


def judge(
    pools: Sequence[Pool], ask: Ask, seconds: float, path: Path | None = None, rounds: int = ROUNDS
) -> list[Verdict]:  # fmt: skip
    """Time all pools, again and again while the next time fits into `seconds`; the verdicts are written as they come.

    Every pass times every batch size anew, so that what a machine does for a while meets all of them. A batch size at
    which the first pass fails is left out.
    """
    began = time.monotonic()
    pools = [narrowed(pool, found) for pool in pools if (found := _asked(ask, pool, FIRST_ROUNDS))]
    samples: dict[int, list[list[float]]] = {pool.size: [[] for _ in pool.pairs] for pool in pools}
    verdicts: list[Verdict] = []
    passes, took = 0, 0.0
    if path is not None:
        path.write_text(json.dumps(as_json(pools, verdicts, passes)))
    while pools and (not passes or time.monotonic() - began + took < seconds):
        start = time.monotonic()
        for pool in pools:
            for row, more in zip(samples[pool.size], _asked(ask, pool, rounds), strict=False):
                row.extend(more)
        passes, took = passes + 1, time.monotonic() - start
        pools = [pool for pool in pools if samples[pool.size][0]]
        verdicts = [verdict(pool, samples[pool.size]) for pool in pools]
        if path is not None:
            path.write_text(json.dumps(as_json(pools, verdicts, passes), indent=1))
    return verdicts


def _asked(ask: Ask, pool: Pool, rounds: int) -> list[list[float]]:
    """Samples of a pool; none where the child was lost, which is said."""
    try:
        return ask(pool.size, pool.pairs, rounds)
    except WorkerLost as lost:
        print(f"judge: M={pool.size}: {lost.kind}: {lost.reason}"[:300], flush=True)
        return []


def as_json(pools: Sequence[Pool], verdicts: Sequence[Verdict], passes: int) -> dict[str, Any]:
    """Everything, in plain values."""
    by_size = {pool.size: pool for pool in pools}
    names = sorted({name for v in verdicts for name in v.regrets})
    return {
        "stage": "judge",
        "passes": passes,
        "rows": [
            {
                "m": v.size, "rounds": v.rounds, "regrets": {name: asdict(j) for name, j in v.regrets.items()},
                "reference": [_spell(by_size[v.size].pairs[place]) for place in v.reference],
                "chosen": {name: _spell(by_size[v.size].pairs[p]) for name, p in by_size[v.size].chosen.items()},
                "pool": len(by_size[v.size].pairs),
            }
            for v in verdicts
        ],
        "mean": {name: asdict(overall(verdicts, name)[0]) for name in names},
    }  # fmt: skip


def _spell(pair: Pair) -> str:
    return ", ".join(f"{p} {pair[p].spell()}" for p in sorted(pair))


def table(verdicts: Sequence[Verdict], runs: Sequence[str]) -> list[str]:
    """Lines to print: per batch size and over all."""
    lines = [f"{'M':>6} " + " ".join(f"{run + ' regret %':>28}" for run in runs) + "  rounds"]
    for v in verdicts:
        cells = [_cell(v.regrets[run]) if run in v.regrets else "-" for run in runs]
        lines.append(f"{v.size:>6} " + " ".join(f"{cell:>28}" for cell in cells) + f"  {v.rounds}")
    for run in runs:
        if any(run in v.regrets for v in verdicts):
            mean, worst = overall(verdicts, run)
            at = next(v for v in verdicts if v.size == worst).regrets[run]
            lines.append(f"judge {run}: mean regret {_cell(mean)} %, worst {_cell(at)} % at M={worst}")
    return lines


def _cell(judged: Judged) -> str:
    return f"{100 * judged.regret:.2f} [{100 * judged.low:.2f}, {100 * judged.high:.2f}]"


def on_device(problem: Problem, engine: str, folder: Path, pools: Sequence[Pool], seconds: float) -> list[Verdict]:
    """Compile what is not in the cache below `folder`, then judge in one fresh child."""
    began = time.monotonic()
    env = {"TRITON_CACHE_DIR": str((folder / "cache").resolve()), **interpreter_env()}
    spec = ChildSpec(folder / "children", env=env)
    options = LiveOptions(engine, routes=5, workers=0 if "TRITON_INTERPRET" in env else pool_size())
    worker = Worker(spec, "judge", [("setup", options.setup(problem))])
    worker.spawn()
    warming = threading.Thread(target=worker.prime, args=(options.first_deadline_s,))
    warming.start()
    try:
        compiled = _compile(Live(spec, problem, options), pools)
        warming.join()
        left = [_without(pool, compiled) for pool in pools]
        print(f"judge: ready after {time.monotonic() - began:.1f} s", flush=True)

        def ask(size: int, pairs: Sequence[Pair], rounds: int) -> list[list[float]]:
            plain = [{p: config.as_dict() for p, config in pair.items()} for pair in pairs]
            answer = worker.ask("finals", _ASK_S, size=size, candidates=plain, rounds=rounds, whole=True)
            if "error" in answer:
                raise WorkerLost(answer["error"], str(answer["reason"]))
            rows: list[list[float]] = answer["samples_us"]
            return rows

        rest = seconds - (time.monotonic() - began)
        return judge([pool for pool in left if pool.chosen], ask, rest, folder / "judge.json")
    finally:
        if warming.is_alive():
            worker.interrupt()
            warming.join()
        worker.kill()


def _compile(live: Live, pools: Sequence[Pool]) -> set[tuple[Projection, Config]]:
    """Compile all configs side by side; which of them did compile."""
    jobs = {(p, config): pool.size for pool in pools for pair in pool.pairs for p, config in pair.items()}
    try:
        if live.pool is None:  # nothing is compiled under the interpreter
            return set(jobs)
        live.submit([Request(Unit(size, p, config), 0, 1) for (p, config), size in jobs.items()])
        until = time.monotonic() + _COMPILE_S
        while time.monotonic() < until and any(live.pool.result(job) is None for job in jobs):
            time.sleep(0.05)
        done = {job: live.pool.result(job) for job in jobs}
    finally:
        live.close()
    return {job for job, result in done.items() if result is not None and result.error is None}


def _without(pool: Pool, compiled: set[tuple[Projection, Config]]) -> Pool:
    """The pool without pairs that did not compile; a tuning whose choice did not is not judged here."""
    return _only(pool, [n for n, pair in enumerate(pool.pairs) if all(job in compiled for job in pair.items())])
