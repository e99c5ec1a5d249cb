"""Which kernel serves: rows as data, selection as a pure function, and what an engine's own source says."""

from __future__ import annotations

from moegate.dispatch.model import Capabilities, DispatchRefused, Problem, Row, Selection, Step
from moegate.dispatch.platforms import NAMES as PLATFORM_NAMES
from moegate.dispatch.platforms import PLATFORMS, Platform, platform_name
from moegate.dispatch.rows import OPS, ROWS, rows_of
from moegate.dispatch.select import AUTO, select

__all__ = [
    "AUTO",
    "OPS",
    "PLATFORMS",
    "PLATFORM_NAMES",
    "ROWS",
    "Capabilities",
    "DispatchRefused",
    "Platform",
    "Problem",
    "Row",
    "Selection",
    "Step",
    "platform_name",
    "rows_of",
    "select",
]
