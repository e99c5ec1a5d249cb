"""The launch strip of a cell: every launch in the order in which it ran, pairs joined, so that ABBA can be seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.svg.core import Scale, dots, el, figure, n, path

__all__ = ["StripPoint", "strip"]

HEIGHT = 84.0


@dataclass(frozen=True)
class StripPoint:
    """One launch: the primary metric's value (None where it has none), which side, which pair, which stage."""

    value: float | None
    candidate: bool
    pair: tuple[str, int] | None
    stage: str
    void: bool


def strip(points: Sequence[StripPoint], *, title: str, desc: str) -> Markup:
    """Draw launches left to right on a logarithmic scale; void launches are marks at the foot."""
    values = [math.log(p.value) for p in points if p.value is not None and p.value > 0 and not p.void]
    if not values:
        return Markup("")
    width = 12.0 * len(points) + 12
    pad = max(0.12 * (max(values) - min(values)), 0.004)
    y = Scale(min(values) - pad, max(values) + pad, HEIGHT - 14, 6)
    at: dict[int, tuple[float, float]] = {}
    for index, point in enumerate(points):
        if point.value is not None and point.value > 0 and not point.void:
            at[index] = (12.0 + 12 * index, y(math.log(point.value)))
    shapes = [*_stages(points), *_joints(points, at)]
    shapes.append(dots([xy for i, xy in at.items() if not points[i].candidate], class_="dot base"))
    shapes.append(dots([xy for i, xy in at.items() if points[i].candidate], class_="dot cand"))
    void = [(12.0 + 12 * i, HEIGHT - 4) for i in range(len(points)) if i not in at]
    if void:
        shapes.append(el("path", d="".join(f"M{n(x)} {n(foot - 5)}V{n(foot)}" for x, foot in void), class_="void"))
    return figure(title, desc, shapes, width=width, height=HEIGHT, preserveAspectRatio="none", class_="strip")


def _stages(points: Sequence[StripPoint]) -> list[Markup]:
    turns = [i for i in range(1, len(points)) if points[i].stage != points[i - 1].stage]
    return [path([(6.0 + 12 * i, 0), (6.0 + 12 * i, HEIGHT)], class_="stage") for i in turns]


def _joints(points: Sequence[StripPoint], at: dict[int, tuple[float, float]]) -> list[Markup]:
    pairs: dict[tuple[str, int], list[int]] = {}
    for index in at:
        pair = points[index].pair
        if pair is not None:
            pairs.setdefault(pair, []).append(index)
    ends = [[at[m] for m in members] for members in pairs.values() if len(members) == 2]
    d = "".join(f"M{n(a[0])} {n(a[1])}L{n(b[0])} {n(b[1])}" for a, b in ends)
    return [el("path", d=d, class_="joint")] if d else []
