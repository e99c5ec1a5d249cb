"""The few SVG words that all figures share: elements, escaped text, linear and gain scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from moegate.text import clean

__all__ = ["Scale", "dots", "el", "figure", "gain_ticks", "log_gain", "n", "nice_ticks", "path", "text"]

# Gains that read well on an axis, as fractions; the widest span wins that still leaves a handful of ticks.
_LOSSES = (-0.9, -0.75, -0.5, -0.3, -0.2, -0.1, -0.05, -0.02, -0.01)
_GAINS = (*_LOSSES, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 9.0, 19.0, 49.0, 99.0)


def n(number: float) -> str:
    """Write a coordinate with one decimal and no needless characters."""
    return "0" if abs(number) < 0.05 else f"{number:.1f}".removesuffix(".0")


def el(name: str, body: str | Markup = "", /, **attributes: object) -> Markup:
    """Return one element; attribute names use `_` for `-` and end in `_` where Python reserves the word."""
    parts = []
    for key, raw in attributes.items():
        if raw is None:
            continue
        shown = n(raw) if isinstance(raw, float) else clean(str(raw))
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    inner = body if isinstance(body, Markup) else escape(clean(body))
    return Markup(f"<{name}{''.join(parts)}/>" if not inner else f"<{name}{''.join(parts)}>{inner}</{name}>")  # noqa: S704


def text(x: float, y: float, words: str, **attributes: object) -> Markup:
    """Return a text element at (x, y), cleaned and escaped."""
    return el("text", words, x=n(x), y=n(y), **attributes)


def path(steps: Sequence[tuple[float, float]], **attributes: object) -> Markup:
    """Return an open polyline through the points as a path."""
    d = "M" + "L".join(f"{n(x)} {n(y)}" for x, y in steps)
    return el("path", d=d, **attributes)


def dots(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    """Return all points as one path of zero-length strokes: round (or square) dots that never distort."""
    d = "".join(f"M{n(x)} {n(y)}h0" for x, y in points)
    return el("path", d=d, **attributes) if d else Markup("")


def figure(
    title: str,
    desc: str,
    body: Iterable[Markup],
    *,
    width: float,
    height: float,
    px: int | None = None,
    **attributes: object,
) -> Markup:
    """Wrap shapes as a titled, described image that assistive technology reads as one thing.

    `px` fixes the width in pixels; without it the picture fills what the style sheet gives it.
    """
    head = el("title", title) + (el("desc", desc) if desc else Markup(""))
    inner = head + Markup("").join(body)
    return el("svg", inner, viewBox=f"0 0 {n(width)} {n(height)}", role="img", width=px, **attributes)


@dataclass(frozen=True)
class Scale:
    """A linear map from `low..high` to `start..end`, clamped at both ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, x: float) -> float:
        """Return the coordinate of `x`."""
        span = self.high - self.low
        share = 0.5 if span <= 0 else (x - self.low) / span
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def log_gain(gain: float) -> float:
    """Return ln(1 + gain), so that a halving and a doubling are equally far from nothing; total losses are clamped."""
    return math.log1p(max(gain, -0.98))


def gain_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return readable gains inside `low..high` (fractions), always with 0 and at most about `most`, evenly thinned."""
    inside = [gain for gain in _GAINS if low <= gain <= high]
    gap = (log_gain(high) - log_gain(low)) / most
    kept = [0.0]
    for side in ([gain for gain in inside if gain > 0], [gain for gain in reversed(inside) if gain < 0]):
        last = 0.0
        for gain in side:
            if abs(log_gain(gain) - log_gain(last)) >= gap * 0.9:
                kept.append(gain)
                last = gain
    return sorted(kept)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers inside `low..high`; the two ends where the range is beyond what has round numbers."""
    raw = (high - low) / most
    if not high > low:
        return [low]
    if not 1e-300 < raw < 1e300:
        return [low, high]
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next((m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw), 10 * magnitude)
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]
