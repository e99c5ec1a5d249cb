"""How many cells came out which way, as one bar."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from reports.svg.core import el, figure, n

__all__ = ["share_bar"]


def share_bar(parts: Sequence[tuple[str, int, str]], *, title: str) -> Markup:
    """Draw parts (word, count, tone class) as one stacked bar; the numbers stand beside it as text."""
    total = sum(number for _, number, _ in parts)
    if not total:
        return Markup("")
    gap, left = 4.0, 0.0
    room = 1000.0 - gap * (sum(1 for _, number, _ in parts if number) - 1)
    shapes = []
    for _, number, tone in parts:
        if number:
            width = room * number / total
            shapes.append(el("rect", x=n(left), y=0, width=n(width), height=10, class_=f"fill t-{tone}"))
            left += width + gap
    words = ", ".join(f"{number} {word}" for word, number, _ in parts if number)
    return figure(title, words, shapes, width=1000.0, height=10.0, preserveAspectRatio="none", class_="share")
