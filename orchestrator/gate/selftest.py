"""The gate's own false-alarm rate and power, simulated through the code that gates real runs.

Every run is planned, screened, confirmed (as the scheduler would, by `moegate.stats`), decided by family and gated by
`gate`. Half of the runs are A/A; in the other half the first cells are slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegate.exits import Exit
from moegate.records import CellOutcome, CellVerdict, ComparePolicy, Comparison, GatePolicy, Plan, PlannedCell
from moegate.stats import CellPairs, Rules, decide, futile, schedule, screen_decision
from orchestrator.gate.policy import gate

FloatArray = NDArray[np.float64]

SPREAD_BETWEEN_CELLS = 0.4
"""Standard deviation of ln(pair sd) between cells."""

OUTLIER_SCALE = 5.0


@dataclass(frozen=True)
class World:
    """What is simulated; all in log ratio (0.03 is about 3 %).

    sd: median over cells of a pair's standard deviation. shift: by how much `shifted` cells are slower. outliers: share
    of pairs whose noise is five times as wide. drift: linear, over the length of a stage, of every launch.
    """

    cells: int = 300
    runs: int = 400
    sd: float = 0.01
    shift: float = 0.03
    shifted: int = 5
    outliers: float = 0.05
    seed: int = 0
    drift: float = 0.0


@dataclass(frozen=True)
class SelfTest:
    """What `orchestrator gate --selftest --json` prints.

    false_alarm_runs: A/A runs with any flagged cell. power: share of the shifted cells that were found slower.
    mean_pairs_per_cell: over the A/A runs.
    """

    false_alarm_runs: int
    runs: int
    power: float
    mean_pairs_per_cell: float


def selftest(world: World, rules: Rules | None = None) -> SelfTest:
    """Simulate `world.runs` A/A runs and as many with shifted cells, and gate them all."""
    rules = rules or Rules()
    plan = _plan(world.cells, rules)
    rng = np.random.default_rng([world.seed, 0])
    alarms = pairs = 0
    for number in range(world.runs):
        cells = _measure(world, np.zeros(world.cells), rules, rng, f"{world.seed}/aa/{number}")
        pairs += sum(len(cell.screen) + len(cell.confirm) for cell in cells)
        alarms += bool(_flagged(plan, cells, rules))
    rng = np.random.default_rng([world.seed, 1])
    truth = np.zeros(world.cells)
    truth[: world.shifted] = -world.shift
    slower = {f"cell-{i}" for i in range(world.shifted)}
    found = 0
    for number in range(world.runs):
        cells = _measure(world, truth, rules, rng, f"{world.seed}/shifted/{number}")
        found += len(_flagged(plan, cells, rules) & slower)
    return SelfTest(
        false_alarm_runs=alarms,
        runs=world.runs,
        power=found / (world.runs * len(slower)) if slower else 0.0,
        mean_pairs_per_cell=pairs / (world.runs * world.cells),
    )


def _measure(world: World, truth: FloatArray, rules: Rules, rng: np.random.Generator, seed: str) -> list[CellPairs]:
    """One run's pairs: screening for all, confirmation where it is asked for, until futility stops it."""
    sd = world.sd * np.exp(SPREAD_BETWEEN_CELLS * rng.standard_normal(world.cells))
    everyone = np.arange(world.cells)
    screen = _draw(world, truth, sd, everyone, rules.screen, rng, f"{seed}/screen")
    direction = screen_decision(screen, rules.log_margin)
    moved = np.flatnonzero(direction)
    confirm: dict[int, FloatArray] = {}
    if moved.size and rules.confirm:
        fresh = _draw(world, truth, sd, moved, rules.confirm, rng, f"{seed}/confirm")
        look = rules.futility
        stops = np.zeros(moved.size, dtype=bool)
        if look is not None and look <= rules.confirm:
            stops = futile(fresh[:, :look], direction[moved], rules.log_margin)
        for row, index in enumerate(moved):
            confirm[int(index)] = fresh[row, :look] if stops[row] else fresh[row]
    return [CellPairs(row.tolist(), confirm[i].tolist() if i in confirm else ()) for i, row in enumerate(screen)]


def _draw(
    world: World,
    truth: FloatArray,
    sd: FloatArray,
    cells: NDArray[np.intp],
    pairs: int,
    rng: np.random.Generator,
    seed: str,
) -> FloatArray:
    """Log ratios ``[cells, pairs]`` in schedule order."""
    noise = rng.standard_normal((cells.size, pairs))
    wide = rng.random((cells.size, pairs)) < world.outliers
    values = truth[cells, None] + sd[cells, None] * np.where(wide, OUTLIER_SCALE * noise, noise)
    if world.drift:
        step = world.drift / max(2 * pairs - 1, 1)
        values += step * np.array([1.0 if order == "AB" else -1.0 for order in schedule(pairs, seed)])
    return np.asarray(values)


def _plan(cells: int, rules: Rules) -> Plan:
    planned = tuple(
        PlannedCell(
            id=f"cell-{i}",
            kind="kernel-bench",
            label=f"cell-{i}",
            axes={},
            why="self test",
            timeout_s=1.0,
            arms=("baseline", "candidate"),
            family="kernel",
        )
        for i in range(cells)
    )
    return Plan(
        name="selftest",
        matrix="",
        matrix_digest="",
        created="",
        version="",
        cells=planned,
        pools=(),
        models=(),
        arms=(),
        images=(),
        compare=ComparePolicy("baseline", "candidate", "equal", rules.screen, rules.confirm, rules.futility),
        gate=GatePolicy(margin=rules.margin, q=rules.q, tolerance=rules.tolerance),
    )


def _flagged(plan: Plan, cells: Sequence[CellPairs], rules: Rules) -> set[str]:
    """The cells that the gate fails: with `expect: equal`, whatever came out improved or regressed."""
    verdicts = tuple(
        CellVerdict(
            cell=planned.id,
            label=planned.label,
            kind=planned.kind,
            family="kernel",
            verdict=decision.verdict,
            reason=decision.reason,
            p=decision.p,
            threshold=decision.threshold,
        )
        for planned, decision in zip(plan.cells, decide(cells, rules), strict=True)
    )
    outcomes = [CellOutcome(planned.id, "PASSED") for planned in plan.cells]
    result = gate(plan, outcomes, Comparison(cells=verdicts))
    return {reason.cell for reason in result.reasons if reason.exit == Exit.REGRESSION and reason.cell}
