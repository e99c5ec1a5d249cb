"""From launches to pairs: which two launches may be compared, and why the others may not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moegate.records import Launch, Measurement, PlannedCell
from moegate.records.plan import MOST_PAIRS
from moegate.stats import roles, void_reason

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
    most = max(Counter(pair.stage for pair in pairs).values(), default=0)
    if most > MOST_PAIRS:  # no plan asks for so many; estimating from them would take all memory
        problem, pairs = problem or f"{most:,} pairs of a stage: at most {MOST_PAIRS} are compared", []
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
    found = roles(launches, arms)
    if isinstance(found, str):
        return found
    baseline, candidate = found
    if baseline.order is not None and candidate.order is not None and abs(baseline.order - candidate.order) != 1:
        return "its partner did not run next to it"
    old, new = (x.detail if timed else {_INPUT: x.detail.get(_INPUT)} for x in (baseline, candidate))
    reason = void_reason(old, new)
    return reason if reason is not None else Pair(stage, number, baseline, candidate)
