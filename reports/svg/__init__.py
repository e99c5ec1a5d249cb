"""Figures as inline SVG: drawn on the server, titled and described, coloured by the page's style sheet alone.

Every function returns markup that needs no script, no font and no network. Shapes carry classes (`base`, `cand`,
`tone`, `grid`, ...); light and dark follow from CSS variables.
"""

from __future__ import annotations

from reports.svg.ecdf import ecdf
from reports.svg.forest import Axis, axis_ruler, forest_axis, interval
from reports.svg.heatmap import HeatCell, HeatRow, heatmap
from reports.svg.share import share_bar
from reports.svg.square import Slope, interaction_plot
from reports.svg.strip import StripPoint, strip
from reports.svg.trend import TrendMark, trend

__all__ = [
    "Axis",
    "HeatCell",
    "HeatRow",
    "Slope",
    "StripPoint",
    "TrendMark",
    "axis_ruler",
    "ecdf",
    "forest_axis",
    "heatmap",
    "interaction_plot",
    "interval",
    "share_bar",
    "strip",
    "trend",
]
