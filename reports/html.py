"""`report.html`: one self-contained page that opens from disk, made from a run's records alone."""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moegate.records import RunBundle
from moegate.text import clean
from reports.text import one_line
from reports.view import Budget, build_page
from reports.view.changes import anchor_for

__all__ = ["environment", "inline_asset", "render"]

MAX_BYTES = 1_450_000
"""What a page of up to 300 cells may weigh; a larger run gets as much per cell."""

SECTIONS = (
    ("verdict", "Verdict"),
    ("changes", "Changes"),
    ("square", "2x2"),
    ("forest", "Movers"),
    ("cells", "Cells"),
    ("missing", "Missing"),
    ("trust", "Trust"),
)
# Sort key, heading, class of the cell table's columns.
COLUMNS = (
    ("r", "outcome", ""),
    ("n", "cell", ""),
    ("k", "kind", "wide"),
    ("o", "pool", "wide"),
    ("g", "gain", "num"),
    ("p", "pairs", "num wide"),
    ("m", "detectable", "num wide"),
)
# The colour of the icon in the browser's tab, by tone.
_ICONS = {"good": "#009e73", "bad": "#d55e00", "open": "#e69f00", "gone": "#cc79a7"}


def _finalize(shown: Any) -> Any:
    """Strip what must never be printed from every value that a template prints; markup of ours passes as it is."""
    return shown if hasattr(shown, "__html__") else clean(str(shown))


@functools.cache
def environment() -> Environment:
    """Return the template environment: everything is escaped, an unknown name is an error."""
    loaded = Environment(
        loader=PackageLoader("reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loaded.globals["anchor_for"] = anchor_for
    loaded.filters["line"] = one_line
    loaded.filters["breaks"] = breakable
    return loaded


def breakable(text: str) -> Markup:
    """Return escaped text that a browser may break after each slash, as long labels need."""
    return Markup(str(escape(clean(text))).replace("/", "/<wbr>"))  # noqa: S704 - escaped on this line


@functools.cache
def inline_asset(name: str) -> tuple[Markup, str]:
    """Return a style sheet or script of ours and the hash by which the page's security policy admits it."""
    loader = environment().loader
    assert loader is not None
    source = loader.get_source(environment(), name)[0]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup(source), f"sha256-{digest}"  # noqa: S704 - our own file, nothing of a run is in it


def icon(tone: str) -> str:
    """Return the tab icon as the escaped body of a data URI."""
    colour = _ICONS.get(tone, "#56b4e9")
    square = f'<rect width="8" height="8" rx="2" fill="{colour}"/>'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{square}</svg>'
    return quote(drawn)


def render(bundle: RunBundle) -> str:
    """Return the report of a run as one HTML document without a single external reference.

    The page of 300 cells stays under 1.5 MB: where it would not, drill-downs are shortened until it does.
    """
    cells = len(bundle.plan.cells)
    limit = MAX_BYTES * max(1.0, cells / 300)
    page = ""
    for budget in Budget.ladder(cells):
        page = _render(bundle, budget)
        if len(page.encode()) <= limit:
            break
    return page


def _render(bundle: RunBundle, budget: Budget) -> str:
    page = build_page(bundle, budget)
    style, style_hash = inline_asset("report.css")
    script, script_hash = inline_asset("report.js")
    template = environment().get_template("report.html.j2")
    return template.render(
        page=page,
        sections=SECTIONS,
        columns=COLUMNS,
        style=style,
        style_hash=style_hash,
        script=script,
        script_hash=script_hash,
        icon=icon(page.gate.tone),
    )
