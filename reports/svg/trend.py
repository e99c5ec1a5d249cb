"""A cell's gain over earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.svg.core import Scale, dots, el, figure, gain_ticks, log_gain, n, path, text
from reports.text import clip, percent

__all__ = ["TrendMark", "trend"]

WIDTH, HEIGHT = 460.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 446.0, 10.0, 118.0


@dataclass(frozen=True)
class TrendMark:
    """One run: when, and the gain with its interval (fractions)."""

    when: str
    gain: float
    low: float
    high: float


def trend(marks: Sequence[TrendMark], zone: float, *, title: str, desc: str) -> Markup:
    """Draw gains by run, oldest first, with intervals and the tolerance shaded; the last mark is this run."""
    if not marks:
        return Markup("")
    gains = [0.0, -2 * zone, 2 * zone] + [g for m in marks for g in (m.low, m.high)]
    low, high = min(gains), max(gains)
    y = Scale(log_gain(low) * 1.05, log_gain(high) * 1.05, _BOTTOM, _TOP)
    x = Scale(0, max(len(marks) - 1, 1), _LEFT + 14, _RIGHT - 14)
    top, bottom = y(log_gain(zone)), y(log_gain(-zone))
    shapes = [el("rect", x=n(_LEFT), y=n(top), width=n(_RIGHT - _LEFT), height=n(bottom - top), class_="zone")]
    for tick in gain_ticks(low, high, most=4):
        at = y(log_gain(tick))
        shapes.append(path([(_LEFT, at), (_RIGHT, at)], class_="zero" if tick == 0 else "grid"))
        shapes.append(text(_LEFT - 7, at + 4, percent(tick, 0), text_anchor="end"))
    points = [(x(i), y(log_gain(m.gain))) for i, m in enumerate(marks)]
    for mark, (at, _) in zip(marks, points, strict=True):
        shapes.append(path([(at, y(log_gain(mark.low))), (at, y(log_gain(mark.high)))], class_="whisker tone"))
    shapes += [path(points, class_="joint"), dots(points[:-1], class_="dot base"), dots(points[-1:], class_="dot cand")]
    shapes.append(text(points[0][0], _BOTTOM + 20, clip(marks[0].when, 10), text_anchor="middle"))
    if len(marks) > 1:
        shapes.append(text(points[-1][0], _BOTTOM + 20, "this run", text_anchor="middle", class_="strong"))
    return figure(title, desc, shapes, width=WIDTH, height=HEIGHT, class_="plot")
