"""Config heat maps: which configuration ran at which batch size, from a config set."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from reports import svg
from reports.text import count
from reports.view.changes import ConfigSet, ConfigTable

__all__ = ["HeatPanel", "heat_panels"]

_MOST_COLUMNS = 24


@dataclass(frozen=True)
class HeatPanel:
    """One projection's map."""

    op: str
    projection: str
    picture: Markup


def heat_panels(one: ConfigSet) -> tuple[HeatPanel, ...]:
    """Return one map per projection of a config set."""
    return tuple(HeatPanel(table.op, table.projection, _picture(table)) for table in one.tables)


def _picture(table: ConfigTable) -> Markup:
    lines = table.lines[:_MOST_COLUMNS]
    rows = []
    for index, name in enumerate(table.columns):
        params = [line.params[index] for line in lines]
        levels = _levels([param.candidate for param in params] + [param.baseline for param in params])
        cells = tuple(
            svg.HeatCell(param.candidate, param.baseline if param.changed else None, level)
            for param, level in zip(params, levels, strict=False)
        )
        rows.append(svg.HeatRow(name, cells))
    return svg.heatmap(
        [line.batch for line in lines],
        rows,
        title=f"{table.op}, {table.projection} projection: configuration by batch size",
        desc=f"{count(len(table.changed), 'batch size')} of {len(table.lines)} run with another configuration",
    )


def _levels(words: list[str]) -> list[float]:
    """Place values between the smallest and largest of their parameter, on a logarithmic scale."""
    numbers = [math.log2(float(word)) if word.isdecimal() and int(word) > 0 else None for word in words]
    known = [number for number in numbers if number is not None]
    if not known:
        return [0.8 if word == "on" else 0.0 for word in words]
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return [0.0 if number is None else 0.15 + 0.75 * (number - low) / span for number in numbers]
