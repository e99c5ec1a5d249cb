"""docs/report.md says what the code does."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

from moegate.records import (
    ComparePolicy,
    DeviceIdentity,
    GatePolicy,
    Launch,
    Plan,
    PlannedCell,
    RunBundle,
    Samples,
)
from moegate.stats import log_ratio
from orchestrator.commands._conclude import OUTPUTS
from orchestrator.scheduler.progress import Progress, pair_line
from orchestrator.scheduler.todo import host_slot
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


def test_the_lines_of_a_run_are_quoted_as_they_are_written() -> None:
    text = (DOCS / "run-directory.md").read_text(encoding="utf-8")
    quoted = text.split("## The lines of a run")[1].split("```")[1]
    plan = Plan("p", "m", "0", "t", "0", (), (), (), (), (), ComparePolicy("untuned", "tuned", screen=3), GatePolicy())
    cell = PlannedCell("c", "serve", "serve/cpu/tiny/moegate/triton/eager", {}, "", 1.0, arms=("untuned", "tuned"))
    progress = Progress(dataclasses.replace(plan, cells=(cell,)), stream := io.StringIO())
    progress.begins()
    progress.started(cell, "screen", 1, host_slot())
    device = DeviceIdentity("cpu", "x", "cpu:x")
    launches = [
        Launch(device, "t", 1.0, (Samples("output_throughput", "tok/s", "higher", (value,), primary=True),), arm=arm)
        for arm, value in (("untuned", 11.31), ("tuned", 35.36))
    ]
    said = pair_line(log_ratio(launches, cell.arms, None), launches, cell.arms, None)  # type: ignore[arg-type]
    progress.step(cell, f"screen pair 1 of 3: {said}")
    written = [line.partition("] ")[2].replace("host/0", "cpu/0") for line in stream.getvalue().splitlines()]
    assert [line.partition("] ")[2] for line in quoted.strip().splitlines()][1:] == written[1:]


def test_pictures_are_there_and_small() -> None:
    names = re.findall(r"\(images/([\w.-]+)\)", TEXT)
    assert len(names) >= 5
    for name in names:
        path = DOCS / "images" / name
        assert path.read_bytes().startswith(b"\x89PNG"), name
        assert path.stat().st_size < 300_000, name
