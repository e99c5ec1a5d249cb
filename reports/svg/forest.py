"""The forest plot: one interval per cell on a shared axis of gains.

Each row is its own small picture that stretches with the page, so that labels stay real text that wraps, links and
can be selected; all rows share one `Axis`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from reports.svg.core import Scale, dots, el, figure, gain_ticks, log_gain, n, path
from reports.text import percent

__all__ = ["Axis", "axis_ruler", "forest_axis", "interval"]

WIDTH, HEIGHT = 1000.0, 30.0
_EDGE = 14.0
_MOST_LOG = 700.0  # whose exponential is still a number


@dataclass(frozen=True)
class Axis:
    """A shared axis of gains; `zone` is the tolerance (fraction) that is shaded on both sides of nothing."""

    scale: Scale
    ticks: tuple[float, ...]
    zone: float

    def x(self, gain: float) -> float:
        """Return the coordinate of a gain."""
        return self.scale(log_gain(gain))


def forest_axis(gains: Iterable[float], zone: float) -> Axis:
    """Return an axis that holds every gain and some room around nothing."""
    values = [log_gain(g) for g in gains] + [log_gain(-2.5 * zone), log_gain(2.5 * zone), 0.0]
    low, high = min(values), max(values)
    pad = 0.04 * (high - low)
    scale = Scale(low - pad, high + pad, _EDGE, WIDTH - _EDGE)
    lowest, highest = math.expm1(low - pad), math.expm1(min(high + pad, _MOST_LOG))
    return Axis(scale, tuple(gain_ticks(lowest, highest)), zone)


def _ground(axis: Axis, height: float) -> list[Markup]:
    left, right = axis.x(-axis.zone), axis.x(axis.zone)
    shapes = [el("rect", x=n(left), y=0, width=n(right - left), height=n(height), class_="zone")]
    grid = "".join(f"M{n(axis.x(tick))} 0V{n(height)}" for tick in axis.ticks if tick != 0)
    shapes.append(el("path", d=grid or "M0 0", class_="grid"))
    shapes.append(path([(axis.x(0), 0), (axis.x(0), height)], class_="zero"))
    return shapes


def interval(axis: Axis, gain: float, low: float, high: float, *, title: str, predicted: float | None = None) -> Markup:
    """Return one row: the interval as a bar, the estimate as a dot, a prediction as a small upright mark."""
    middle = HEIGHT / 2
    shapes = _ground(axis, HEIGHT)
    shapes.append(path([(axis.x(low), middle), (axis.x(high), middle)], class_="ci"))
    if predicted is not None:
        at = axis.x(predicted)
        shapes.append(path([(at, middle - 9), (at, middle + 9)], class_="pred"))
    shapes.append(dots([(axis.x(gain), middle)], class_="est"))
    return figure(title, "", shapes, width=WIDTH, height=HEIGHT, preserveAspectRatio="none", class_="row")


def axis_ruler(axis: Axis) -> list[tuple[str, str]]:
    """Return the tick labels of the axis as (position in percent of the width, words)."""
    return [(f"{axis.x(tick) / WIDTH * 100:.2f}", percent(tick, 0)) for tick in axis.ticks]
