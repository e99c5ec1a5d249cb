"""Two finished runs side by side, where that is honest.

Launches of two runs are never paired: days differ. What can be compared is what each run measured within itself, its
candidate against its own baseline. Where both runs had the same baseline, on the same device, in the same environment,
under the same load, the difference of the two gains is the difference of the two candidates. Anything else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from moegate import canonical
from moegate.records import CellVerdict, Launch, Measurement, Plan, PlannedCell, to_json
from moegate.stats import adjusted_p, rules_of, shift, two_sample_p
from moegate.stats.stages import EQUIVALENCE_ALPHA
from orchestrator.compare.core import arms_of, compare

_OWN_VERSIONS = frozenset({"moegate"})  # what the runs may differ in: it is what is being compared


@dataclass(frozen=True)
class CrossVerdict:
    """Run B against run A for one cell.

    verdict None: refused, `reason` says why. change: gain of B over A (fraction, positive is better) with its interval.
    p: two-sided against the margin, Mann-Whitney. pairs: used of A and of B.
    """

    cell: str
    label: str
    verdict: Literal["improved", "regressed", "equivalent", "inconclusive"] | None
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    p: float | None = None
    pairs: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class CrossComparison:
    """`only_a` and `only_b`: labels of cells that the other run does not have."""

    cells: tuple[CrossVerdict, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


@dataclass(frozen=True)
class _Side:
    plan: Plan
    cell: PlannedCell
    verdict: CellVerdict
    measurements: tuple[Measurement, ...]

    def baseline(self) -> list[Launch]:
        arm = arms_of(self.plan, self.cell)[0]
        return [x for m in self.measurements for x in m.launches if x.arm == arm and x.void_reason is None]

    def pairs(self) -> tuple[float, ...]:
        return self.verdict.log_ratios_confirm or self.verdict.log_ratios_screen


class Run(Protocol):
    """What is needed of a run: a bundle has it, and so has a run directory that was read."""

    @property
    def plan(self) -> Plan: ...  # noqa: D102 - as in RunBundle

    @property
    def measurements(self) -> dict[str, tuple[Measurement, ...]]: ...  # noqa: D102


def compare_runs(a: Run, b: Run) -> CrossComparison:
    """Compare the gains of two finished runs, cell by cell (same id), with the rules of run B's policy."""
    sides_a, sides_b = _sides(a), _sides(b)
    both = [cell for cell in sides_b if cell in sides_a]
    refusals = {cell: refusal(sides_a[cell], sides_b[cell]) for cell in both}
    judged = [cell for cell in both if refusals[cell] is None]
    rules = rules_of(b.plan)
    rows = {cell: (sides_a[cell].pairs(), sides_b[cell].pairs()) for cell in judged}
    ps = [_two_sided(*rows[cell], rules.log_margin) for cell in judged]
    limits = dict(zip(judged, zip(ps, adjusted_p(ps) <= rules.q, strict=True), strict=True)) if judged else {}
    cells = []
    for cell in both:
        side, why = sides_b[cell], refusals[cell]
        if why is not None:
            cells.append(CrossVerdict(cell, side.cell.label, None, why))
            continue
        p, rejected = limits[cell]
        cells.append(_judge(side.cell, *rows[cell], p, bool(rejected), rules.log_tolerance))
    return CrossComparison(
        cells=tuple(cells),
        only_a=tuple(sides_a[cell].cell.label for cell in sides_a if cell not in sides_b),
        only_b=tuple(sides_b[cell].cell.label for cell in sides_b if cell not in sides_a),
    )


def _sides(run: Run) -> dict[str, _Side]:
    verdicts = {verdict.cell: verdict for verdict in compare(run.plan, run.measurements).cells}
    return {
        cell.id: _Side(run.plan, cell, verdicts[cell.id], tuple(run.measurements.get(cell.id, ())))
        for cell in run.plan.cells
        if cell.arms and cell.kind != "accuracy"
    }


def _two_sided(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    return min(1.0, 2.0 * min(two_sample_p(b, a, margin, 1), two_sample_p(b, a, margin, -1)))


def _judge(
    cell: PlannedCell, a: Sequence[float], b: Sequence[float], p: float, rejected: bool, tolerance: float
) -> CrossVerdict:
    estimate, interval = shift(b, a)
    tost = max(two_sample_p(b, a, -tolerance, 1), two_sample_p(b, a, -tolerance, -1))
    verdict: Literal["improved", "regressed", "equivalent", "inconclusive"]
    if rejected:
        verdict, reason = ("improved" if estimate > 0 else "regressed"), f"p {p:.2g} against the margin"
    elif tost <= EQUIVALENCE_ALPHA:
        verdict, reason = "equivalent", f"within the tolerance (p {tost:.2g})"
    else:
        verdict, reason = "inconclusive", f"p {p:.2g}; equivalence p {tost:.2g}"
    change, low, high = (math.expm1(x) for x in (estimate, interval.low, interval.high))
    used = (len(a), len(b))
    return CrossVerdict(cell.id, cell.label, verdict, reason, change, low, high, interval.level, p, used)


Reading = Callable[[_Side], Any]


def _devices(side: _Side) -> Any:
    return sorted({launch.device.identity for launch in side.baseline()})


def _device_facts(side: _Side) -> Any:
    return sorted({(x.device.name, x.device.arch, x.device.driver) for x in side.baseline()})


def _environment(side: _Side) -> Any:
    merged: dict[str, str] = {}
    for measurement in side.measurements:
        merged.update(measurement.environment)
    return {name: value for name, value in sorted(merged.items()) if name not in _OWN_VERSIONS}


def _hosts(side: _Side) -> Any:
    found = [measurement.detail.get("host") for measurement in side.measurements]
    return found[0] if found and all(host == found[0] for host in found) else found


def _baseline_content(side: _Side) -> Any:
    proofs = [launch.proof for launch in side.baseline() if launch.proof is not None]
    facts = {(p.engine, p.resolved_backend, p.configs_digest, p.kernel_hash) for p in proofs}
    return sorted(facts) or None


def _load(side: _Side) -> Any:
    names = ("sequence_sha256", "input_sha256")
    return sorted({str(launch.detail[name]) for launch in side.baseline() for name in names if name in launch.detail})


def _model(side: _Side) -> Any:
    model = next((m for m in side.plan.models if m.name == side.cell.model), None)
    return None if model is None else [model.digest, model.weights, model.revision, model.tp, model.ep, model.dtype]


def _metric(side: _Side) -> Any:
    effect = side.verdict.effect
    return None if effect is None else (effect.metric, effect.unit, effect.better)


def _interpreted(side: _Side) -> Any:
    return any(measurement.interpreter for measurement in side.measurements)


CONDITIONS: Mapping[str, Reading] = {
    "the metrics": _metric,
    "the devices": _devices,
    "the device facts": _device_facts,
    "the environments": _environment,
    "the hosts": _hosts,
    "the models": _model,
    "the loads": _load,
    "the baselines": _baseline_content,
    "the use of Triton's interpreter": _interpreted,
}
"""What must be equal in both runs before a cell of theirs is compared; the one reader is `refusal`."""


def refusal(a: _Side, b: _Side) -> str | None:
    """Why two cells must not be compared, or None."""
    for name, side in (("A", a), ("B", b)):
        if side.verdict.verdict is None:
            return f"run {name} has no verdict for it: {side.verdict.reason}"
    for what, read in CONDITIONS.items():
        one, other = to_json(read(a)), to_json(read(b))
        if canonical.dumps(one) != canonical.dumps(other):
            return f"{what} differ: {_first_difference(one, other)}"
    if _baseline_content(a) is None:
        return "the baselines are not proven to be the same: no launch carries a proof"
    return None


def _first_difference(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        name = min(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        return f"{name}: {one.get(name)} and {other.get(name)}"
    return f"{_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = canonical.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
