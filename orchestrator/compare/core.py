"""From a plan and its measurements to one verdict per cell. A pure function of records; the gate comes after it.

The way of a cell: launches -> pairs (`pairs`), pairs -> log ratios of its primary metric (`effects`), all cells of a
family together -> decisions (`moegate.stats.decide`), and then what concerns several cells: a control that moved voids
its pool, predictions meet measurements, backends form 2x2s.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from moegate.records import CellVerdict, Comparison, Effect, Measurement, Plan, PlannedCell
from moegate.records.plan import Family
from moegate.stats import CellPairs as StagePairs
from moegate.stats import (
    Decision,
    Rules,
    at_most,
    decide,
    minimum_detectable_effect,
    more_pairs,
    pair_sd,
    rules_of,
)
from orchestrator.compare import prediction
from orchestrator.compare.accuracy import judge_accuracy
from orchestrator.compare.divergence import first_divergence
from orchestrator.compare.effects import MetricPairs, effects_of, measured, metric_pairs
from orchestrator.compare.interactions import interactions_of
from orchestrator.compare.pairs import CellPairs, Pair, pair_up

TAIL_FLOORS = {"p99": 662, "p90": 64}
"""Requests per arm below which a tail quantile is shown but never gated."""

_MOST_METRICS = 400
"""Of a cell that are estimated: more than any kind measures. The primary one is always among them."""

_TAIL = re.compile(r"(?:^|_)(p\d+)(?:_|$)")


@dataclass
class _Work:
    """What is known of one cell so far."""

    cell: PlannedCell
    found: CellPairs
    problem: str | None = None
    primary: MetricPairs | None = None
    screen: tuple[float, ...] = ()
    confirm: tuple[float, ...] = ()
    decision: Decision | None = None
    family_size: int = 0
    used: tuple[Pair, ...] = ()
    effects: list[Effect] = field(default_factory=list)


def compare(
    plan: Plan, measurements: Mapping[str, Sequence[Measurement]], moe_layers: Mapping[str, int] | None = None
) -> Comparison:
    """Compare the arms of every cell that has them.

    measurements: cell id -> results of its finished attempts, in order. moe_layers: model name -> number of MoE layers,
    for predictions. Cells without arms do not appear; a cell that cannot be judged appears with verdict None.
    """
    rules = rules_of(plan)
    works = [_collect(plan, cell, measurements.get(cell.id, ()), rules) for cell in plan.cells if cell.arms]
    _decide_families(works, rules)
    _fill_effects(works)
    verdicts = {work.cell.id: _verdict(work, rules) for work in works}
    _predict(works, verdicts, moe_layers or {})
    voided = _voided_pools(works, verdicts)
    for work in works:
        _void(work.cell, verdicts, voided)
    return _comparison(plan, works, verdicts, voided)


def arms_of(plan: Plan, cell: PlannedCell) -> tuple[str, str]:
    """(baseline, candidate) of a cell; an A/A cell may name one arm once or twice."""
    if cell.aa or len(set(cell.arms)) == 1:
        return cell.arms[0], cell.arms[-1]
    policy = plan.compare
    if policy is not None and {policy.baseline, policy.candidate} == set(cell.arms):
        return policy.baseline, policy.candidate
    return cell.arms[0], cell.arms[1]


def _collect(plan: Plan, cell: PlannedCell, results: Sequence[Measurement], rules: Rules) -> _Work:
    found = pair_up(cell, arms_of(plan, cell), results)
    work = _Work(cell, found, problem="no finished attempt" if not results else found.problem)
    if work.problem is None and any(result.status == "failed" for result in results):
        work.problem = next((r.failure for r in results if r.failure), None) or "its measurement failed"
    if work.problem is not None or cell.kind == "accuracy":
        return work
    metric = plan.gate.metric.get(cell.kind)
    found = work.found = _with_metric(found, metric)
    primary = metric_pairs(found.pairs, metric)
    if isinstance(primary, str):
        why = f" ({'; '.join(found.void_reasons)})" if found.void_reasons and not found.pairs else ""
        work.problem = primary + why
        return work
    work.primary = primary
    signed = list(zip(found.pairs, primary.signed(), strict=True))
    work.screen = tuple(value for pair, value in signed if pair.stage == "screen")
    work.confirm = tuple(value for pair, value in signed if pair.stage == "confirm")
    if len(work.screen) < rules.screen:
        void = f", {found.void_launches} launches void" if found.void_launches else ""
        work.problem = f"{len(work.screen)} of {rules.screen} screening pairs{void}"
    return work


def _with_metric(found: CellPairs, metric: str | None) -> CellPairs:
    """Without the pairs that lack the primary metric, as the scheduler ran them again; unless they all do."""
    kept = tuple(pair for pair in found.pairs if measured(pair, metric))
    lost = len(found.pairs) - len(kept)
    if not kept or not lost:
        return found
    reasons = tuple(dict.fromkeys((*found.void_reasons, f"no positive value of {metric or 'the primary metric'}")))
    return replace(found, pairs=kept, void_launches=found.void_launches + 2 * lost, void_reasons=reasons)


def _decide_families(works: Sequence[_Work], rules: Rules) -> None:
    families: dict[Family, list[_Work]] = defaultdict(list)
    for work in works:
        if work.problem is None and work.primary is not None:
            families[work.cell.judged_in].append(work)
    for members in families.values():
        decisions = decide([StagePairs(work.screen, work.confirm) for work in members], rules)
        screened = sum(decision.direction != 0 for decision in decisions)
        for work, decision in zip(members, decisions, strict=True):
            work.decision, work.family_size = decision, max(screened, 1)


def _fill_effects(works: Sequence[_Work]) -> None:
    """Estimate every metric of every cell: from the fresh pairs where they carry the verdict, else from all."""
    rows: list[MetricPairs] = []
    owners: list[_Work] = []
    for work in works:
        if work.primary is None:
            continue
        proven = work.decision is not None and work.decision.verdict in ("improved", "regressed")
        # Pairs that picked a cell for being far out would overstate how far out it is.
        work.used = tuple(pair for pair in work.found.pairs if pair.stage == "confirm" or not proven)
        names = dict.fromkeys([work.primary.metric, *(s.metric for s in work.used[0].baseline.samples)])
        for name in islice(names, _MOST_METRICS):
            metric = metric_pairs(work.used, name)
            if isinstance(metric, MetricPairs):
                rows.append(metric)
                owners.append(work)
    for work, effect in zip(owners, effects_of(rows), strict=True):
        work.effects.append(effect)


def _verdict(work: _Work, rules: Rules) -> CellVerdict:
    cell = work.cell
    base = CellVerdict(
        cell=cell.id,
        label=cell.label,
        kind=cell.kind,
        family=cell.judged_in,
        verdict=None,
        reason=work.problem or "",
        control=cell.control,
        aa=cell.aa,
        effect=work.effects[0] if work.effects else None,
        others=tuple(work.effects[1:]),
        log_ratios_screen=work.screen,
        log_ratios_confirm=work.confirm,
        void_launches=work.found.void_launches,
        device=work.found.device,
        peak_memory=_peak_memory(work.found.pairs),
    )
    if work.problem is not None:
        return base
    if cell.kind == "accuracy":
        return _accuracy(base, work.found)
    assert work.decision is not None
    decision, pairs = work.decision, work.screen + work.confirm
    tail = _ungated_tail(work)
    verdict = "inconclusive" if tail else decision.verdict
    alpha = rules.q / work.family_size
    return replace(
        base,
        verdict=verdict,
        reason=tail or decision.reason,
        p=decision.p,
        threshold=decision.threshold,
        detectable=minimum_detectable_effect(pair_sd(pairs), rules.confirm, margin=rules.margin, alpha=alpha),
        more_pairs=more_pairs(pairs, rules, work.family_size) if verdict == "inconclusive" and not tail else None,
    )


def _accuracy(base: CellVerdict, found: CellPairs) -> CellVerdict:
    if not found.pairs:
        return replace(base, reason=f"both arms are needed: {'; '.join(found.void_reasons)}")
    pair = found.pairs[-1]
    answer = judge_accuracy(pair)
    return replace(
        base, verdict=answer.verdict, reason=answer.reason, effect=answer.effect, p=answer.p, more_pairs=None,
        divergence=first_divergence(pair.baseline.detail, pair.candidate.detail),
    )  # fmt: skip


def _ungated_tail(work: _Work) -> str | None:
    """Why a tail quantile must not decide, or None."""
    assert work.primary is not None
    match = _TAIL.search(work.primary.metric)
    floor = TAIL_FLOORS.get(match[1]) if match else None
    if floor is None:
        return None
    old = sum(_requests(pair.baseline.detail) for pair in work.used)
    new = sum(_requests(pair.candidate.detail) for pair in work.used)
    if min(old, new) >= floor:
        return None
    return f"{work.primary.metric} is not gated under {floor} requests per arm ({min(old, new)})"


def _requests(detail: Mapping[str, object]) -> int:
    completed = detail.get("completed")
    return int(completed) if isinstance(completed, int | float) and 0 <= completed < 1e15 else 0


def _peak_memory(pairs: Sequence[Pair]) -> dict[str, int]:
    """The most device memory that each arm ever held."""
    peaks: dict[str, int] = {}
    for pair in pairs:
        for launch in (pair.baseline, pair.candidate):
            if launch.arm is not None and launch.peak_memory_bytes is not None:
                peaks[launch.arm] = max(peaks.get(launch.arm, 0), launch.peak_memory_bytes)
    return peaks


def _predict(works: Sequence[_Work], verdicts: dict[str, CellVerdict], moe_layers: Mapping[str, int]) -> None:
    kernels: dict[tuple[str | None, str | None], list[tuple[PlannedCell, prediction.KernelTimes]]] = defaultdict(list)
    for work in works:
        if work.cell.kind == "kernel-bench" and (found := prediction.kernel_times(work.used)):
            kernels[work.cell.pool, work.cell.model].append((work.cell, found))
    for work in works:
        if work.cell.kind != "serve" or not work.used:
            continue
        near = kernels.get((work.cell.pool, work.cell.model), ())
        timed = [(cell, times) for cell, times in near if prediction.matches(work.cell, cell)]
        if not timed:
            continue
        # Eager or captured, a kernel gains the same; the cell that ran as the server did is still the better witness.
        _, times = min(timed, key=lambda item: item[0].axes.get("graph") != work.cell.axes.get("graph"))
        answer = prediction.predict(
            times,
            prediction.batch_sizes(work.used),
            layers=moe_layers.get(work.cell.model or ""),
            tpot_us=prediction.baseline_tpot_us(work.used),
        )
        if answer is not None:
            verdicts[work.cell.id] = replace(
                verdicts[work.cell.id], predicted=answer.gain, predicted_whole_step=answer.whole_step
            )


def _voided_pools(works: Sequence[_Work], verdicts: Mapping[str, CellVerdict]) -> dict[str, str]:
    """Pools whose control moved: what moved it may have moved everything else there."""
    voided: dict[str, str] = {}
    for work in works:
        verdict = verdicts[work.cell.id]
        if verdict.null and verdict.verdict in ("improved", "regressed"):
            what = "A/A cell" if verdict.aa else "control"
            gain = f"{100 * verdict.effect.gain:+.1f} %" if verdict.effect else ""
            voided.setdefault(work.cell.pool or "", f"{what} {verdict.label} {verdict.verdict} ({gain})")
    return voided


def _void(cell: PlannedCell, verdicts: dict[str, CellVerdict], voided: Mapping[str, str]) -> None:
    """Take back the speed verdict of a cell in a voided pool; controls keep theirs, they are the evidence."""
    verdict = verdicts[cell.id]
    if (cell.pool or "") in voided and verdict.verdict and cell.kind != "accuracy" and not cell.null:
        was = f"void: {voided[cell.pool or '']}; it would have been {verdict.verdict}"
        verdicts[cell.id] = replace(verdict, verdict=None, reason=was, more_pairs=None)


def _comparison(
    plan: Plan, works: Sequence[_Work], verdicts: Mapping[str, CellVerdict], voided: dict[str, str]
) -> Comparison:
    judged = [v for v in verdicts.values() if v.aa and v.verdict is not None]
    flagged = sum(v.verdict in ("improved", "regressed") for v in judged)
    return Comparison(
        cells=tuple(verdicts[work.cell.id] for work in works),
        interactions=interactions_of([work.cell for work in works], verdicts),
        voided_pools=voided,
        aa_cells=len(judged),
        aa_flagged=flagged,
        aa_upper=at_most(flagged, len(judged)) if judged else None,
        notes=_notes(works),
    )


def _notes(works: Sequence[_Work]) -> tuple[str, ...]:
    void = sum(work.found.void_launches for work in works)
    reasons = dict.fromkeys(reason for work in works for reason in work.found.void_reasons)
    return (f"{void} launches were not used: {'; '.join(reasons)}",) if void else ()
