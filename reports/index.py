"""An index of runs: one page that works from disk, from any static server, and from `orchestrator browse`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup

from moegate.records import RunCard
from reports import svg
from reports.html import environment, icon, inline_asset
from reports.text import one_line
from reports.words import GateLook, gate_look, gate_sentence

__all__ = ["render"]

# Sort key, heading, class of the table's columns; the script finds them by these keys.
COLUMNS = (
    ("r", "gate", ""),
    ("n", "run", ""),
    ("k", "matrix", "wide"),
    ("o", "started, UTC", ""),
    ("p", "cells", "num wide"),
    ("", "outcomes", "wide"),
    ("", "files", "wide"),
)
_RANKS = {"running": 0, "fails": 1, "wrong": 1, "incomplete": 2, "undecided": 3, "interrupted": 4, "passes": 5}
# Counts of the gate as parts of a bar: (word, tone, the counts that belong to it); what is left of the cells is calm.
_PARTS = (
    ("improved", "good", ("improved",)),
    ("equivalent", "same", ("equivalent",)),
    ("controls held", "same", ("control_equivalent",)),
    ("controls not shown to move", "open", ("control_inconclusive",)),
    ("inconclusive", "open", ("inconclusive",)),
    ("regressed", "bad", ("regressed", "control_regressed", "control_improved")),
    ("failed", "bad", ("failed", "timeout", "oom", "crashed")),
    ("without an answer", "gone", ("missing", "device_lost", "infra_error", "cancelled", "blocked")),
)
_SHOWN_FILES = ("junit.xml", "results.sarif", "summary.md")


@dataclass(frozen=True)
class IndexRow:
    """One run as the page shows it; `href` is None where there is no report to open."""

    card: RunCard
    look: GateLook
    rank: int
    href: str | None
    name: str
    started: str
    sentence: str
    share: Markup
    files: tuple[tuple[str, str], ...]


def render(cards: Sequence[RunCard], *, title: str) -> str:
    """Return the index of runs, newest first, with relative links into their folders."""
    rows = [_row(card) for card in sorted(cards, key=lambda card: (card.started, card.folder), reverse=True)]
    chips: dict[str, tuple[GateLook, int]] = {}
    for row in rows:
        chips[row.look.key] = (row.look, chips.get(row.look.key, (row.look, 0))[1] + 1)
    style, style_hash = inline_asset("report.css")
    script, script_hash = inline_asset("report.js")
    template = environment().get_template("index.html.j2")
    return template.render(
        title=one_line(title, 200),
        rows=rows,
        chips=sorted(chips.values(), key=lambda chip: _RANKS.get(chip[0].key, 3)),
        names=sorted({one_line(card.name, 80) for card in cards}),
        columns=COLUMNS,
        style=style,
        style_hash=style_hash,
        script=script,
        script_hash=script_hash,
        icon=icon("same"),
    )


def _row(card: RunCard) -> IndexRow:
    look = gate_look(None if card.running else card.exit, running=card.running)
    base = quote(card.folder, errors="replace") + "/" if card.folder else ""
    parts = [(word, sum(card.counts.get(key, 0) for key in keys), tone) for word, tone, keys in _PARTS]
    calm = card.counts.get("cells", 0) - sum(number for _, number, _ in parts)
    parts.append(("others", max(calm, 0), "done"))
    return IndexRow(
        card=card,
        look=look,
        rank=_RANKS.get(look.key, 3),
        href=f"{base}report.html" if "report.html" in card.files else None,
        name=one_line(card.folder or card.name, 120),
        started=one_line(card.started, 40)[:16].replace("T", " "),
        sentence=one_line(card.problem, 240) or gate_sentence(card.sentence, 240) or _unjudged(card),
        share=svg.share_bar(parts, title=f"Outcomes of {one_line(card.folder or card.name, 80)}"),
        files=tuple((base + name, name) for name in _SHOWN_FILES if name in card.files),
    )


def _unjudged(card: RunCard) -> str:
    """What is to be said of a run that no gate has judged and nobody is at work on."""
    if card.exit is not None or card.running:
        return ""
    return "It ended before it was judged; `orchestrator run` with --resume and --out goes on with it."
