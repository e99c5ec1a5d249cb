"""Latency distributions of the two arms, as empirical cumulative curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from reports.svg.core import Scale, figure, nice_ticks, path, text

__all__ = ["ecdf"]

WIDTH, HEIGHT = 460.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 446.0, 12.0, 160.0


def ecdf(base: Sequence[float], cand: Sequence[float], *, unit: str, title: str, desc: str, steps: int = 160) -> Markup:
    """Draw the share of values at or below x for both arms; the axis ends at the 99.5 % point of the slower one.

    Longer curves are drawn with about `steps` steps, at even shares.
    """
    curves = [sorted(v for v in values if math.isfinite(v)) for values in (base, cand)]
    if not all(curves):
        return Markup("")
    low = min(curve[0] for curve in curves)
    high = max(curve[min(len(curve) - 1, math.ceil(0.995 * len(curve)))] for curve in curves)
    x, y = Scale(low, high if high > low else low + 1, _LEFT, _RIGHT), Scale(0, 1, _BOTTOM, _TOP)
    shapes = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes.append(path([(_LEFT, y(share)), (_RIGHT, y(share))], class_="zero" if share == 0 else "grid"))
        shapes.append(text(_LEFT - 7, y(share) + 4, f"{share * 100:.0f} %", text_anchor="end"))
    for tick in nice_ticks(low, high):
        shapes.append(text(x(tick), _BOTTOM + 17, f"{tick:g}", text_anchor="middle"))
    shapes.append(text(_RIGHT, _BOTTOM + 34, unit, text_anchor="end", class_="strong"))
    for curve, side in zip(curves, ("base", "cand"), strict=True):
        shapes.append(path(_steps(curve, x, y, steps), class_=f"slope {side}"))
    return figure(title, desc, shapes, width=WIDTH, height=HEIGHT, class_="plot")


def _steps(curve: Sequence[float], x: Scale, y: Scale, most: int) -> list[tuple[float, float]]:
    stride = max(1, -(-len(curve) // most))
    points, last = [(x(curve[0]), y(0))], 0.0
    for index in range(0, len(curve), stride):
        share = min(index + stride, len(curve)) / len(curve)
        points += [(x(curve[index]), y(last)), (x(curve[index]), y(share))]
        last = share
    points.append((x.end, y(1)))
    return points
