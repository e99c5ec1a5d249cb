"""docs/report.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from moegate.records import RunBundle
from orchestrator.commands._conclude import OUTPUTS
from reports import html, summary
from reports.view import detail, page
from reports.words import LOOKS

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "report.md").read_text(encoding="utf-8")


def test_outcomes_are_those_of_the_code() -> None:
    table = re.findall(r"^\| (\S) \| ([\w ]+) \| (.+) \|$", TEXT, re.M)
    assert {word: (arrow, meaning) for arrow, word, meaning in table} == {
        look.word: (look.arrow, look.meaning) for look in LOOKS.values()
    }


def test_files_are_those_that_a_run_writes() -> None:
    assert set(re.findall(r"^\| `([\w.]+)` \|", TEXT, re.M)) == set(OUTPUTS)


def test_limits_are_those_of_the_code() -> None:
    words = " ".join(TEXT.split())  # wherever the lines are broken
    assert html.MAX_BYTES < 1_500_000
    assert f"Above {page._MOST_DETAILS:,} cells" in words
    assert f"at most {page._MOST_FOREST} cells" in words
    assert f"at most {page._MOST_SETS} are shown" in words
    assert summary.MAX_BYTES <= 1024 * 1024
    for key in (*detail._CLOCKS, "throttle_reasons", "series"):
        assert f"`{key}`" in TEXT


def test_sections_come_in_the_order_of_the_page(green: RunBundle) -> None:
    names = re.findall(r"^\d\. \*\*(.+?)\*\*", TEXT, re.M)
    assert [name.rstrip(".").lower() for name in names] == [
        "verdict",
        "counts",
        "what changed between the arms",
        "arm by backend",
        "top movers",
        "cells",
        "one cell",
        "missing and quarantined",
        "how far to trust this page",
    ]
    text = html.render(green).lower()
    at = [text.index(f">{name}</h2>") for name in (n.lower() for n in names[2:]) if f">{name}</h2>" in text]
    assert len(at) >= 6
    assert at == sorted(at)


def test_pictures_are_there_and_small() -> None:
    names = re.findall(r"\(images/([\w.-]+)\)", TEXT)
    assert len(names) >= 5
    for name in names:
        path = DOCS / "images" / name
        assert path.read_bytes().startswith(b"\x89PNG"), name
        assert path.stat().st_size < 300_000, name
