"""The page as data: everything the template prints, decided here and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from moegate.exits import rank
from moegate.records import Effect, RunBundle
from moegate.stats import at_most
from reports import svg
from reports.text import count, one_line, percent
from reports.view.changes import ArmRow, ConfigSet, DispatchRow, anchor_for, arm_rows, config_sets, dispatch_rows
from reports.view.detail import Budget, Detail, badges_of, build_detail
from reports.view.heat import HeatPanel, heat_panels
from reports.view.joined import Joined, basis_of, devices_of, gain_of, join, span_of
from reports.view.reading import Q_LINE, gain_line, interval_line, outcome_lines, reading
from reports.view.square import Square, squares
from reports.words import LOOKS, GateLook, Look, Outcome, gate_look, gate_sentence

__all__ = ["INTERPRETER_NOTE", "Page", "Row", "Tile", "Trust", "build_page", "headline"]

INTERPRETER_NOTE = (
    "Timings on this page were taken under Triton's interpreter on a CPU. They are real times of interpreted kernels: "
    "they compare the two arms with each other and are no claim about any hardware."
)
_MOST_DETAILS, _MOST_FOREST, _MOST_SETS, _MOST_SQUARES = 1500, 24, 24, 12


@dataclass(frozen=True)
class Tile:
    """One count at the top, which is also a filter of the table."""

    key: Outcome
    look: Look
    number: int


@dataclass(frozen=True)
class Reason:
    """One thing that decided the exit code."""

    message: str
    exit: int
    anchor: str | None
    label: str


@dataclass(frozen=True)
class Row:
    """One row of the cell table."""

    joined: Joined
    anchor: str | None
    badges: tuple[str, ...]
    gain: str
    gain_key: float | None
    interval: str
    pairs: int | None
    detectable: str
    detectable_key: float | None
    gain_title: str


@dataclass(frozen=True)
class ForestRow:
    """One interval of the forest plot."""

    joined: Joined
    anchor: str
    gain: str
    interval: str
    picture: Markup


@dataclass(frozen=True)
class Trust:
    """How far this page can be believed: false alarms seen in A/A cells, and what could have been found."""

    aa: str
    unmoved: str
    detectable: str
    pairs: str
    void: str
    voided_pools: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    """All of the report, in the order in which it is printed."""

    bundle: RunBundle
    gate: GateLook
    sentence: str
    headline: str
    gain_line: str
    interval_line: str
    outcome_lines: tuple[str, ...]
    reading: tuple[tuple[str, str], ...]
    policy: tuple[tuple[str, str], ...]
    reasons: tuple[Reason, ...]
    reasons_hidden: int
    interpreter: str
    notes: tuple[str, ...]
    devices: tuple[str, ...]
    tiles: tuple[Tile, ...]
    share: Markup
    arms: tuple[str, str]
    arm_rows: tuple[ArmRow, ...]
    sets: tuple[ConfigSet, ...]
    sets_hidden: int
    heat: dict[str, tuple[HeatPanel, ...]]
    dispatch: tuple[DispatchRow, ...]
    environment: tuple[tuple[str, str], ...]
    environment_differs: bool
    squares: tuple[Square, ...]
    squares_hidden: int
    forest: tuple[ForestRow, ...]
    forest_ticks: tuple[tuple[str, str], ...]
    forest_hidden: int
    forest_predicted: bool
    rows: tuple[Row, ...]
    kinds: tuple[str, ...]
    details: tuple[Detail, ...]
    details_hidden: int
    missing: tuple[Joined, ...]
    quarantined: tuple[Joined, ...]
    trust: Trust


def build_page(bundle: RunBundle, budget: Budget) -> Page:
    """Decide everything that the report says about a run; `budget` bounds each cell's drill-down."""
    cells = join(bundle)
    ranked = sorted(cells, key=_rank)
    sets, anchors = config_sets(cells)
    shown_sets = sets[:_MOST_SETS]
    kept = {one.anchor: one for one in shown_sets}
    configs = {cell: kept[anchor] for cell, anchor in anchors.items() if anchor in kept}
    detailed = ranked[:_MOST_DETAILS]
    details = tuple(build_detail(bundle, joined, budget, configs) for joined in detailed)
    linked = {detail.joined.cell.id for detail in details}
    all_squares = squares(bundle, cells)
    forest, ticks = _forest(bundle, cells)
    arms, rows = arm_rows(bundle)
    tiles, share = _tiles(cells)
    return Page(
        bundle=bundle,
        gate=gate_look(bundle.gate.exit),
        sentence=gate_sentence(bundle.gate.sentence, 600),
        headline=headline(all_squares),
        gain_line=gain_line(bundle),
        interval_line=interval_line(cells),
        outcome_lines=outcome_lines(cells),
        reading=reading(bundle, cells),
        policy=_policy(bundle),
        reasons=_reasons(bundle, cells, linked),
        reasons_hidden=max(0, len(bundle.gate.reasons) - 40),
        interpreter=INTERPRETER_NOTE if any(joined.interpreter for joined in cells) else "",
        notes=_notes(bundle),
        devices=devices_of(*cells)[:16],
        tiles=tiles,
        share=share,
        arms=arms,
        arm_rows=rows,
        sets=shown_sets,
        sets_hidden=len(sets) - len(shown_sets),
        heat={one.anchor: heat_panels(one) for one in shown_sets[:6]},
        dispatch=dispatch_rows(cells)[:40],
        environment=tuple((one_line(k, 60), one_line(v, 200)) for k, v in sorted(bundle.environment.items())[:80]),
        environment_differs=any(" | " in value for value in bundle.environment.values()),
        squares=all_squares[:_MOST_SQUARES],
        squares_hidden=max(0, len(all_squares) - _MOST_SQUARES),
        forest=forest,
        forest_ticks=ticks,
        forest_hidden=max(0, sum(_effect(j) is not None for j in cells) - len(forest)),
        forest_predicted=any(row.joined.verdict and row.joined.verdict.predicted is not None for row in forest),
        rows=tuple(_row(joined, joined.cell.id in linked) for joined in ranked),
        kinds=tuple(sorted({joined.cell.kind for joined in cells})),
        details=details,
        details_hidden=len(ranked) - len(details),
        missing=tuple(joined for joined in ranked if joined.word == "missing")[:400],
        quarantined=tuple(joined for joined in ranked if joined.word == "quarantined")[:400],
        trust=_trust(bundle, cells),
    )


def headline(found: tuple[Square, ...]) -> str:
    """Return the most telling 2x2 in one sentence, or nothing."""
    return next((square.sentence for square in found if square.plot), "")


def _rank(joined: Joined) -> tuple[int, float, str]:
    effect = _effect(joined)
    return joined.look.rank, -abs(effect.gain) if effect else 0.0, joined.label


def _effect(joined: Joined) -> Effect | None:
    return joined.verdict.effect if joined.verdict is not None else None


def _policy(bundle: RunBundle) -> tuple[tuple[str, str], ...]:
    gate, compare = bundle.plan.gate, bundle.plan.compare
    rows: list[tuple[str, str]] = []
    if compare is not None:
        rows.append(("expects", {"no_regression": "no regression"}.get(compare.expect, compare.expect)))
        stop = f", given up after {compare.futility} that do not reach the margin" if compare.futility else ""
        rows.append(("pairs", f"{compare.screen} to screen, up to {compare.confirm} fresh to confirm{stop}"))
    rows.append(("margin", f"{percent(gate.margin, 1, sign=False)}: a smaller change does not count"))
    rows.append(("tolerance", f"{percent(gate.tolerance, 1, sign=False)}: within it arms are equivalent"))
    rows.append(("false discoveries", f"q = {gate.q:g} per family: {Q_LINE}"))
    rows.append(("inconclusive cells", {"warn": "warn", "fail": "fail the run"}[gate.inconclusive]))
    rows += [(f"metric of {kind} cells", one_line(metric, 60)) for kind, metric in sorted(gate.metric.items())]
    if gate.required:
        rows.append(("required", one_line(", ".join(gate.required), 120)))
    rows += [(f"tier, {one_line(where, 60)}", one_line(tier, 30)) for where, tier in sorted(gate.tiers.items())[:8]]
    return tuple(rows)


def _reasons(bundle: RunBundle, cells: Iterable[Joined], linked: set[str]) -> tuple[Reason, ...]:
    labels = {joined.cell.id: joined.label for joined in cells}
    ordered = sorted(bundle.gate.reasons, key=lambda reason: rank(reason.exit))[:40]
    return tuple(
        Reason(
            message=one_line(reason.message, 400),
            exit=reason.exit,
            anchor=anchor_for(reason.cell) if reason.cell in linked and reason.cell else None,
            label=one_line(labels.get(reason.cell or "", reason.cell or ""), 120),
        )
        for reason in ordered
    )


def _tiles(cells: tuple[Joined, ...]) -> tuple[tuple[Tile, ...], Markup]:
    counts = Counter(joined.word for joined in cells)
    always: tuple[Outcome, ...] = ("improved", "equivalent", "inconclusive", "regressed", "failed", "missing")
    others: tuple[Outcome, ...] = ("moved", "unmoved", "held", "passed", "quarantined")
    shown = (*always, *(key for key in others if counts.get(key)))
    tiles = tuple(Tile(key, LOOKS[key], counts.get(key, 0)) for key in shown)
    parts = [(tile.look.word, tile.number, tile.look.tone) for tile in tiles]
    return tiles, svg.share_bar(parts, title=f"Outcomes of {count(len(cells), 'cell')}")


def _forest(bundle: RunBundle, cells: Iterable[Joined]) -> tuple[tuple[ForestRow, ...], tuple[tuple[str, str], ...]]:
    speed = (joined for joined in cells if joined.cell.kind != "accuracy")
    movers = [(joined, effect) for joined in speed if (effect := _effect(joined)) is not None]
    movers = sorted(movers, key=lambda mover: -abs(mover[1].gain))[:_MOST_FOREST]
    if not movers:
        return (), ()
    movers.sort(key=lambda mover: -mover[1].gain)
    ends = [end for _, effect in movers for end in (effect.gain_low, effect.gain_high)]
    ends += [j.verdict.predicted for j, _ in movers if j.verdict and j.verdict.predicted is not None]
    axis = svg.forest_axis(ends, bundle.plan.gate.tolerance)
    rows = []
    for joined, effect in movers:
        span = span_of(joined, effect)
        title = f"{joined.label}: {gain_of(joined, effect)}, {span}, {joined.look.word}"
        predicted = joined.verdict.predicted if joined.verdict else None
        drawn = svg.interval(axis, effect.gain, effect.gain_low, effect.gain_high, title=title, predicted=predicted)
        rows.append(ForestRow(joined, anchor_for(joined.cell.id), gain_of(joined, effect), span, drawn))
    return tuple(rows), tuple(svg.axis_ruler(axis))


def _row(joined: Joined, linked: bool) -> Row:
    verdict, effect = joined.verdict, _effect(joined)
    return Row(
        joined=joined,
        anchor=anchor_for(joined.cell.id) if linked else None,
        badges=badges_of(joined),
        gain=gain_of(joined, effect) if effect else "",
        gain_key=effect.gain if effect else None,
        interval=span_of(joined, effect) if effect else "",
        pairs=effect.pairs if effect else None,
        detectable=percent(verdict.detectable, sign=False) if verdict and verdict.detectable is not None else "",
        detectable_key=verdict.detectable if verdict else None,
        gain_title=", ".join(filter(None, (one_line(effect.metric, 60), basis_of(joined, effect)))) if effect else "",
    )


def _false_alarms(bundle: RunBundle) -> str:
    """How often null cells were flagged: in this run, and in all runs of its history together."""
    comparison = bundle.comparison
    flagged, judged = comparison.aa_flagged, comparison.aa_cells
    said = [_rate(flagged, judged, "in this run", comparison.aa_upper)]
    if not judged:
        said = ["This run has no A/A cell (the matrix key aa adds one)"]
    before, trials = bundle.aa_before
    if trials:
        upper = at_most(flagged + before, judged + trials)
        said.append(_rate(flagged + before, judged + trials, "with the earlier runs of this history", upper))
    controls = [v for v in comparison.cells if v.control and v.verdict is not None]
    if controls:
        moved = sum(v.verdict in ("improved", "regressed") for v in controls)
        said.append(f"{moved} of {count(len(controls), 'negative control')} moved")
    return "; ".join(said) + "."


def _rate(flagged: int, judged: int, where: str, upper: float | None) -> str:
    bound = "" if upper is None else f" (95 % confidence: a rate of at most {percent(upper, 1, sign=False)})"
    return f"{flagged} of {count(judged, 'A/A cell')} flagged {where}{bound}"


def _unmoved(cells: Iterable[Joined]) -> str:
    """What the controls and A/A cells that were not seen to move leave open; empty where they leave nothing."""
    open_ones = [joined for joined in cells if joined.word == "unmoved"]
    if not open_ones:
        return ""
    effects = [effect for joined in open_ones if joined.cell.kind != "accuracy" and (effect := _effect(joined))]
    size = ""
    if effects:
        ends = min(effect.gain_low for effect in effects), max(effect.gain_high for effect in effects)
        size = f": their intervals reach from {percent(ends[0], 1)} to {percent(ends[1], 1)}"
    who = count(len(open_ones), "control or A/A cell was", "controls and A/A cells were")
    return f"{who} not shown to move, and not shown to stand still either{size}."


def _notes(bundle: RunBundle) -> tuple[str, ...]:
    """Every note once: a plan's warnings are notes of the run as well."""
    said = (*bundle.plan.warnings, *bundle.notes, *bundle.comparison.notes)
    return tuple(dict.fromkeys(one_line(note, 300) for note in said))[:40]


def _trust(bundle: RunBundle, cells: Iterable[Joined]) -> Trust:
    comparison = bundle.comparison
    aa = _false_alarms(bundle)
    floors = [v.detectable for v in comparison.cells if v.detectable is not None]
    detectable = "Not known: no cell has the pairs for it."
    blind = sum(v.detectable is None and v.kind != "accuracy" and v.effect is not None for v in comparison.cells)
    who = f"the {count(len(floors), 'cell')} with the pairs for it" if blind else "the cells"
    none = (
        f" {count(blind, 'cell')} could have shown none, however large: too few pairs for a family of their size."
        if blind
        else ""
    )
    if floors:
        detectable = (
            f"Half of {who} could have shown a change of {percent(median(floors), 1, sign=False)}, "
            f"every one of them a change of {percent(max(floors), 1, sign=False)}.{none}"
        )
    pairs = [v.effect.pairs for v in comparison.cells if v.effect is not None]
    used = f"{count(sum(pairs), 'pair')} over {count(len(pairs), 'compared cell')}"
    used += f", {sum(pairs) / len(pairs):.1f} on average" if pairs else ""
    void = sum(v.void_launches for v in comparison.cells)
    pools = tuple((one_line(name, 60), one_line(why, 300)) for name, why in sorted(comparison.voided_pools.items()))
    return Trust(aa, _unmoved(cells), detectable, used, count(void, "void launch", "void launches"), pools)
