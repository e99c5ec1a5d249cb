"""Two config sets held against each other on the device: whole op, alternating, in fresh processes, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moegate.errors import InfraError
from moegate.stats import hodges_lehmann, interval
from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.live import LiveOptions
from tuner.lookup import Lookup
from tuner.problem import Problem

__all__ = ["LEAST_LEVEL", "Compared", "compare", "verdict_of"]

LEAST_LEVEL = 0.9
"""A verdict takes an interval of at least this level, which five processes reach (93.75 %) and four do not (87.5 %)."""

Verdict = Literal["improved", "regressed", "equivalent", "inconclusive", "same config"]


@dataclass(frozen=True)
class Compared:
    """One batch size. `ratio` is A's time over B's (above 1: B is faster) with the interval's ends and its level."""

    batch_size: int
    verdict: Verdict
    a_us: float
    b_us: float
    ratio: float
    low: float
    high: float
    level: float
    a: dict[str, Any]
    b: dict[str, Any]


def verdict_of(log_ratios: Sequence[float], margin: float) -> tuple[Verdict, float, float, float, float]:
    """Verdict, estimate, low, high and level from one log ratio (A over B) per process; margins in log ratios.

    Below `LEAST_LEVEL` nothing is concluded: three processes that agree do so by chance in one case of four.
    """
    estimate = float(hodges_lehmann(log_ratios))
    found = interval(log_ratios)
    if found.level < LEAST_LEVEL:
        verdict: Verdict = "inconclusive"
    elif found.low > 0 and estimate >= margin:
        verdict = "improved"
    elif found.high < 0 and estimate <= -margin:
        verdict = "regressed"
    elif -margin <= found.low and found.high <= margin:
        verdict = "equivalent"
    else:
        verdict = "inconclusive"
    return verdict, estimate, found.low, found.high, found.level


def compare(
    spec: ChildSpec,
    problem: Problem,
    options: LiveOptions,
    look: Callable[[dict[str, Any]], tuple[Lookup, Lookup]],
    sizes: Sequence[int],
    *,
    launches: int = 5,
    rounds: int = 4,
    margin: float = 0.01,
    report: Callable[[str], None] = lambda text: None,
) -> list[Compared]:
    """Measure both sets in `launches` fresh children, A first in one and B first in the next.

    Args:
        spec: how children are started.
        problem: what runs.
        options: how it is driven.
        look: from what a child says of its device and its kernel to the look-ups of A and B.
        sizes: batch sizes.
        launches: fresh processes: the unit of replication.
        rounds: alternating rounds per batch size and process; their median counts once.
        margin: relative difference below which two sets count as equal.
        report: called with a line per process.

    Raises:
        InfraError: a child does not start or does not answer.
    """
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    looked: tuple[Lookup, Lookup] | None = None
    kernel = {"engine": options.engine, "problem": problem.as_dict(), "sizes": list(sizes)}
    for launch in range(launches):
        worker = Worker(spec, f"compare-{launch}")
        try:
            hello = _ask(worker, "hello", options.first_deadline_s, **kernel)
            _ask(worker, "setup", options.first_deadline_s, **options.setup(problem))
            looked = looked or look(hello)
            for size in sizes:
                configs = [_configs(side, size) for side in looked]
                if configs[0] == configs[1]:
                    continue
                turned = configs if launch % 2 == 0 else configs[::-1]
                answer = _ask(
                    worker, "finals", options.first_deadline_s, size=size, candidates=turned, rounds=rounds
                )  # fmt: skip
                medians = [statistics.median(row) for row in answer["samples_us"]]
                a, b = medians if launch % 2 == 0 else medians[::-1]
                ratios[size].append(math.log(a / b))
                times[size].append((a, b))
        finally:
            worker.stop()
        report(f"process {launch + 1} of {launches}")
    assert looked is not None
    return [_compared(size, looked, ratios[size], times[size], math.log1p(margin)) for size in sizes]


def _compared(size: int, looked: tuple[Lookup, Lookup], ratios: list[float], times: list[tuple[float, float]],
              margin: float) -> Compared:  # fmt: skip
    a, b = (_configs(side, size) for side in looked)
    if not ratios:
        return Compared(size, "same config", 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, a, b)
    verdict, estimate, low, high, level = verdict_of(ratios, margin)
    a_us, b_us = (round(statistics.median(row), 3) for row in zip(*times, strict=True))
    return Compared(size, verdict, a_us, b_us, math.exp(estimate), math.exp(low), math.exp(high), level, a, b)


def _configs(side: Lookup, size: int) -> dict[str, Any]:
    return {projection: dict(config) for projection, config in side.at(size).configs.items()}


def _ask(worker: Worker, verb: str, timeout_s: float, **args: Any) -> dict[str, Any]:
    try:
        answer = worker.ask(verb, timeout_s, **args)
    except WorkerLost as lost:
        raise InfraError(f"{verb} of {args.get('size', 'the child')}: {lost.reason}") from None
    if "error" in answer:
        raise InfraError(f"{verb}: {answer['error']}: {answer['reason']}")
    return answer
