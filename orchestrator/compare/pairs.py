"""From launches to pairs: which two launches may be compared, and why the others may not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from moegate.records import Launch, Measurement, PlannedCell, Samples
from moegate.stats import void_reason

Stage = Literal["screen", "confirm"]
STAGES: tuple[Stage, ...] = ("screen", "confirm")

_INPUT = "input_sha256"


@dataclass(frozen=True)
class Pair:
    """Two launches, adjacent in time on the same device."""

    stage: Stage
    number: int
    baseline: Launch
    candidate: Launch


@dataclass(frozen=True)
class CellPairs:
    """What a cell's launches amount to.

    pairs: the valid ones, in stage and pair order. void_launches: launches that were not used. void_reasons: why, each
    once. device: identity of the one device. problem: why the launches cannot be believed at all; then no verdict.
    """

    pairs: tuple[Pair, ...]
    void_launches: int
    void_reasons: tuple[str, ...]
    device: str
    problem: str | None


def pair_up(cell: PlannedCell, arms: tuple[str, str], measurements: Sequence[Measurement]) -> CellPairs:
    """Form the pairs of a cell from the results of its finished attempts, in order.

    A stage that was measured again replaces the earlier one. Launches on different devices are a problem, never a pair.
    """
    launches = _latest(measurements)
    problem = _problem(cell, launches)
    groups: dict[tuple[Stage, int], list[Launch]] = defaultdict(list)
    void: list[str] = []
    for launch in launches:
        # An accuracy cell has one stage, which has no name.
        stage = launch.stage or ("screen" if cell.kind == "accuracy" else None)
        if stage is None or launch.pair is None or launch.arm is None:
            problem = problem or "a launch without arm, pair or stage"
        elif launch.void_reason is not None:
            void.append(launch.void_reason)
        else:
            groups[stage, launch.pair].append(launch)
    pairs = []
    for key in sorted(groups, key=lambda k: (STAGES.index(k[0]), k[1])):
        found = _form(key, groups[key], arms, timed=cell.kind != "accuracy")
        if isinstance(found, Pair):
            pairs.append(found)
            void.extend(["an earlier try of its pair"] * (len(groups[key]) - 2))
        else:
            void.extend([found] * len(groups[key]))
    device = launches[0].device.identity if launches else ""
    return CellPairs(tuple(pairs), len(void), tuple(dict.fromkeys(void)), device, problem)


def _latest(measurements: Sequence[Measurement]) -> list[Launch]:
    by_stage: dict[Stage | None, list[Launch]] = {}
    for measurement in measurements:
        fresh: dict[Stage | None, list[Launch]] = defaultdict(list)
        for launch in measurement.launches:
            fresh[launch.stage].append(launch)
        by_stage.update(fresh)
    return [launch for launches in by_stage.values() for launch in launches]


def _problem(cell: PlannedCell, launches: Sequence[Launch]) -> str | None:
    devices = {launch.device.identity: launch.device.name for launch in launches if launch.void_reason is None}
    if len(devices) > 1:
        return f"its launches ran on {len(devices)} devices ({', '.join(sorted(devices))}): pairs need one"
    if not launches:
        return "no launch"
    if cell.arms and any(launch.arm is not None and launch.arm not in cell.arms for launch in launches):
        return f"a launch of an arm that is not {' or '.join(dict.fromkeys(cell.arms))}"
    return None


def _form(key: tuple[Stage, int], launches: list[Launch], arms: tuple[str, str], *, timed: bool) -> Pair | str:
    """The pair of these launches, or why there is none. Heat and clocks spoil a timing, not an answer."""
    stage, number = key
    ordered = sorted(launches, key=lambda launch: -1 if launch.order is None else launch.order)
    if arms[0] == arms[1]:
        last = ordered[-2:]
        if len(last) < 2:
            return "its partner is missing"
        # The arms are the same: ABBA roles by the pair's number, so that a drift still cancels.
        baseline, candidate = last if number % 2 == 0 else (last[1], last[0])
    else:
        found = [[launch for launch in ordered if launch.arm == arm] for arm in arms]
        if not all(found):
            return "its partner is missing"
        baseline, candidate = found[0][-1], found[1][-1]
    if baseline.order is not None and candidate.order is not None and abs(baseline.order - candidate.order) != 1:
        return "its partner did not run next to it"
    old, new = (x.detail if timed else {_INPUT: x.detail.get(_INPUT)} for x in (baseline, candidate))
    reason = void_reason(old, new)
    return reason if reason is not None else Pair(stage, number, baseline, candidate)


def samples_of(launch: Launch, metric: str | None) -> Samples | None:
    """The samples of a metric by name, or (None) of the launch's own primary metric."""
    if metric is None:
        return launch.primary()
    return next((samples for samples in launch.samples if samples.metric == metric), None)


def value_of(samples: Samples) -> float | None:
    """What a launch says of a metric: the median of its values; None where that is not a positive number."""
    values = samples.values
    if not values:
        return None
    value = values[0] if len(values) == 1 else median(values)
    return value if math.isfinite(value) and value > 0.0 else None
