"""Which configuration won at which batch size, and what changed against the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.svg.core import el, figure, n, text
from reports.text import clip

__all__ = ["HeatCell", "HeatRow", "heatmap"]

_CELL_W, _CELL_H, _LABEL, _HEAD, _GAP = 60.0, 36.0, 92.0, 26.0, 3.0


@dataclass(frozen=True)
class HeatCell:
    """One parameter at one batch size: the candidate's value, the baseline's where it differs, a level in 0..1."""

    words: str
    before: str | None
    level: float


@dataclass(frozen=True)
class HeatRow:
    """One parameter of the configuration over all batch sizes."""

    name: str
    cells: tuple[HeatCell, ...]


def heatmap(columns: Sequence[str], rows: Sequence[HeatRow], *, title: str, desc: str) -> Markup:
    """Draw parameters down, batch sizes across; darker is larger, a frame and the old value mark a change."""
    if not columns or not rows:
        return Markup("")
    shapes = [text(_LABEL - 10, _HEAD - 9, "batch size", text_anchor="end", class_="strong")]
    for index, name in enumerate(columns):
        shapes.append(text(_x(index) + _CELL_W / 2, _HEAD - 9, name, text_anchor="middle", class_="strong"))
    for down, row in enumerate(rows):
        top = _HEAD + down * (_CELL_H + _GAP)
        shapes.append(text(_LABEL - 10, top + 22, clip(row.name, 12), text_anchor="end"))
        for index, cell in enumerate(row.cells):
            shapes += _cell(_x(index), top, cell)
    width = _x(len(columns)) + 1
    height = _HEAD + len(rows) * (_CELL_H + _GAP) + 1
    return figure(title, desc, shapes, width=width, height=height, class_="heat", px=int(width))


def _x(index: int) -> float:
    return _LABEL + index * (_CELL_W + _GAP)


def _cell(left: float, top: float, cell: HeatCell) -> list[Markup]:
    level = round(max(0.0, min(cell.level, 1.0)) * 5)
    box = {"x": n(left), "y": n(top), "width": n(_CELL_W), "height": n(_CELL_H), "rx": 5}
    changed = cell.before is not None
    shapes = [el("rect", class_=f"h{level}" + (" chg" if changed else ""), **box)]
    middle = left + _CELL_W / 2
    if cell.before is not None:
        shapes.append(text(middle, top + 13, clip(f"was {cell.before}", 10), text_anchor="middle", class_="was"))
        shapes.append(text(middle, top + 28, clip(cell.words, 7), text_anchor="middle", class_="strong"))
    else:
        shapes.append(text(middle, top + 23, clip(cell.words, 7), text_anchor="middle"))
    return shapes
