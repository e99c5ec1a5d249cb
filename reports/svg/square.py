"""The interaction plot: what the candidate arm gains on each backend, from one common start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from reports.svg.core import Scale, dots, el, figure, gain_ticks, log_gain, n, path, text
from reports.text import clip, percent

__all__ = ["Slope", "interaction_plot"]

WIDTH, HEIGHT = 460.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 312.0, 18.0, 232.0


@dataclass(frozen=True)
class Slope:
    """One backend's line: gain with interval (fractions), and what was predicted for it."""

    name: str
    gain: float
    low: float
    high: float
    control: bool
    predicted: float | None = None


def interaction_plot(slopes: Sequence[Slope], *, arms: tuple[str, str], title: str, desc: str) -> Markup:
    """Draw one line per backend from nothing (baseline) to its gain (candidate); parallel lines mean no interaction."""
    gains = [0.0, -0.03, 0.03]
    for s in slopes:
        gains += [s.low, s.high, s.gain] + ([] if s.predicted is None else [s.predicted])
    low, high = min(gains), max(gains)
    y = Scale(log_gain(low) * 1.05, log_gain(high) * 1.05, _BOTTOM, _TOP)
    shapes = []
    for tick in gain_ticks(low, high, most=6):
        at = y(log_gain(tick))
        shapes.append(path([(_LEFT, at), (_RIGHT, at)], class_="zero" if tick == 0 else "grid"))
        shapes.append(text(_LEFT - 8, at + 4, percent(tick, 0), text_anchor="end"))
    shapes += [_arm(_LEFT + 20, arms[0]), _arm(_RIGHT - 20, arms[1])]
    for slope, label_y in zip(slopes, _spread([y(log_gain(s.gain)) for s in slopes]), strict=True):
        shapes += _line(slope, y, label_y)
    return figure(title, desc, shapes, width=WIDTH, height=HEIGHT, class_="plot")


def _arm(x: float, name: str) -> Markup:
    return text(x, _BOTTOM + 24, clip(name, 22), text_anchor="middle", class_="strong")


def _line(slope: Slope, y: Scale, label_y: float) -> list[Markup]:
    start, end = (_LEFT + 20, y(0.0)), (_RIGHT - 20, y(log_gain(slope.gain)))
    side = "ctrl" if slope.control else "cand"
    bar = [(end[0], y(log_gain(slope.low))), (end[0], y(log_gain(slope.high)))]
    shapes = [path([start, end], class_=f"slope {side}"), path(bar, class_=f"whisker {side}")]
    shapes.append(dots([start], class_="dot base"))
    shapes.append(dots([end], class_=f"dot {side}"))
    if slope.predicted is not None:
        px, py = end[0] + 14, y(log_gain(slope.predicted))
        diamond = f"M{n(px)} {n(py - 5)}l5 5l-5 5l-5-5z"
        shapes.append(el("path", d=diamond, class_="diamond"))
    words = el("tspan", clip(slope.name, 18), class_="strong")
    shapes.append(el("text", words, x=n(_RIGHT + 10), y=n(label_y), class_=f"end {side}"))
    gain = percent(slope.gain) + (" (control)" if slope.control else "")
    shapes.append(text(_RIGHT + 10, label_y + 16, gain, class_="end"))
    return shapes


def _spread(wanted: Sequence[float], least: float = 38.0) -> list[float]:
    """Move labels apart so that none covers another, keeping their order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for before, after in pairwise(order):
        placed[after] = max(placed[after], placed[before] + least)
    overflow = max(placed, default=0.0) - (_BOTTOM - 4)
    return [p - overflow for p in placed] if overflow > 0 else placed
