"""The pictures of one cell's drill-down: its launches in order, its latencies, and its gains over earlier runs."""

from __future__ import annotations

from statistics import median

from markupsafe import Markup

from moegate.records import Launch, RunBundle
from reports import svg
from reports.text import clip, count, one_line, percent, value
from reports.view.joined import Joined, primary_value, side_of

__all__ = ["history_figure", "latency_curves", "launch_strip"]

_MOST = 1e15  # of a latency, in milliseconds
_MOST_DRAWN = 400  # launches: beyond what any policy in use takes, and little enough for a page


def launch_strip(joined: Joined) -> tuple[Markup, str]:
    """Return the strip of a cell's launches and, in words, what it shows."""
    launches = joined.launches[:_MOST_DRAWN]
    points = [
        svg.StripPoint(
            value=primary_value(launch),
            candidate=side_of(joined, launch) == 1,
            pair=None if launch.pair is None else (launch.stage or "", launch.pair),
            stage=launch.stage or "",
            void=launch.void_reason is not None,
        )
        for launch in launches
    ]
    if len(points) < 2:
        return Markup(""), ""
    order = _order(points)
    void = sum(point.void for point in points)
    some = f" of {len(joined.launches)}" if len(joined.launches) > len(points) else ""
    note = f"{count(len(points), 'launch', 'launches')}{some} in order: {clip(order, 190)}"
    note += f"; {void} void, not paired" if void else ""
    shown = next((s for launch in launches if (s := launch.primary()) is not None), None)
    metric = shown.metric if shown is not None else "primary metric"
    if shown is not None:
        unit = f" in {shown.unit}" if shown.unit else ""
        note += one_line(f"; upwards {metric}{unit}, {shown.better} is better", 160)
    note += "; the dashed line begins the confirmation" if len({point.stage for point in points}) > 1 else ""
    return svg.strip(points, title=f"Launches of {joined.label} by {metric}", desc=note), note


def _order(points: list[svg.StripPoint]) -> str:
    """Spell the order of launches, pairs apart: `AB BA | AB BA`."""
    words: list[str] = []
    for index, point in enumerate(points):
        before = points[index - 1] if index else None
        if before is not None and before.stage != point.stage:
            words.append(" | ")
        elif before is not None and before.pair != point.pair:
            words.append(" ")
        words.append("B" if point.candidate else "A")
    return "".join(words)


def latency_curves(joined: Joined, most: int, steps: int) -> tuple[tuple[str, Markup], ...]:
    """Return the distributions of metrics of which each arm has at least 20 values, at most so many, of so many steps.

    On a crowded page, which has room for one, only cells that a person will look at carry it.
    """
    if not most or (most == 1 and joined.look.rank > 4):
        return ()
    pools: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for launch in joined.launches:
        if launch.void_reason is None:
            for samples in launch.samples:
                if len(samples.values) > 1 and not samples.primary:
                    arms = pools.setdefault((samples.metric, samples.unit), ([], []))
                    arms[side_of(joined, launch)].extend(samples.values)
            for metric, values in _series(launch):
                pools.setdefault((metric, "ms"), ([], []))[side_of(joined, launch)].extend(values)
    curves = []
    for (metric, unit), (base, cand) in pools.items():
        if min(len(base), len(cand)) >= 20:
            desc = f"medians {value(median(base), unit)} and {value(median(cand), unit)}"
            title = f"{metric}: share of {len(base)} and {len(cand)} values at or below"
            curves.append((one_line(title, 120), svg.ecdf(base, cand, unit=unit, title=title, desc=desc, steps=steps)))
    return tuple(curves[:most])


def _series(launch: Launch) -> list[tuple[str, list[float]]]:
    """Return the per-request series that a load client left in a launch, in milliseconds."""
    raw = launch.detail.get("series")
    if not isinstance(raw, dict):
        return []
    rows = [(str(name), values) for name, values in raw.items() if isinstance(values, list)]
    return [
        (name, [float(v) for v in values if isinstance(v, int | float) and abs(v) < _MOST]) for name, values in rows
    ]


def history_figure(bundle: RunBundle, joined: Joined) -> Markup:
    """Return the trend of a cell over earlier runs, with this run last; empty where there is none."""
    earlier = bundle.history.get(joined.cell.id, ())[-40:]
    verdict = joined.verdict
    if not earlier or verdict is None or verdict.effect is None:
        return Markup("")
    marks = [svg.TrendMark(point.time[:10], point.gain, point.low, point.high) for point in earlier]
    effect = verdict.effect
    marks.append(svg.TrendMark("this run", effect.gain, effect.gain_low, effect.gain_high))
    desc = f"{count(len(earlier), 'earlier run')}, the last gained {percent(earlier[-1].gain)}"
    title = f"Gain of {joined.label} by run"
    return svg.trend(marks, bundle.plan.gate.tolerance, title=title, desc=desc)
