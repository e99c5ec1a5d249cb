"""The index of runs in a real Chromium, served by `orchestrator browse` itself."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moegate import records
from reports import html

pytestmark = pytest.mark.browser
_VISIBLE = "return [...document.querySelectorAll('#table tbody tr')].filter(r => r.offsetParent).map(r => r.dataset.v)"


@pytest.fixture
def folder(tmp_path: Path, runs: ModuleType) -> Path:
    """A passing, a failing and an unfinished run, which nobody works on."""
    root = tmp_path / "runs"
    for name, bundle, judged in (
        ("cpu-1", runs.make_green(), True),
        ("cpu-2", runs.make_red(), True),
        ("cpu-3", runs.make_green(), False),
    ):
        (root / name).mkdir(parents=True)
        records.write(root / name / "plan.json", bundle.plan)
        if judged:
            records.write(root / name / "gate.json", bundle.gate)
            (root / name / "report.html").write_text(html.render(bundle), encoding="utf-8")
    return root


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """`orchestrator browse` on a free port; it ends cleanly on SIGINT."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "browse", str(folder), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", line)
    yield line
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    process.stdout.close()


def test_index_lists_filters_and_leads_to_reports(browser: Any, address: str) -> None:
    browser.view(1280, 800)
    browser.open(address)
    assert sorted(browser.js(_VISIBLE)) == ["fails", "interrupted", "passes"]
    browser.click(".chip[data-v=fails]")
    assert browser.js(_VISIBLE) == ["fails"]
    assert browser.js("return document.getElementById('shown').textContent") == "1 of 3 runs"
    browser.click("#table a")
    browser.wait("return location.pathname.endsWith('report.html') && document.readyState === 'complete'")
    assert browser.js("return document.querySelector('h1').innerText.trim().split(/\\s+/)") == ["✕", "Fails"]
    assert browser.console() == []
    assert all(asked.startswith((address, "data:")) for asked in browser.requests())


def test_static_index_works_from_disk(browser: Any, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "orchestrator", "browse", str(folder), "--write"], check=True, capture_output=True
    )
    url = (folder / "index.html").as_uri()
    browser.view(390, 844)
    browser.open(url)
    assert len(browser.js(_VISIBLE)) == 3
    assert browser.js("return document.documentElement.scrollWidth") == 390
    assert browser.console() == []
    assert {asked for asked in browser.requests() if not asked.startswith("data:")} == {url}
    link = browser.js("return document.querySelector('#table a').href")
    browser.open(link)
    assert browser.js("return document.querySelectorAll('#verdict').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation_in_the_index(
    browser: Any, folder: Path, axe: Callable[[Any], list[Any]], scheme: str
) -> None:
    subprocess.run(
        [sys.executable, "-m", "orchestrator", "browse", str(folder), "--write"], check=True, capture_output=True
    )
    browser.view(1280, 800, scheme)
    browser.open((folder / "index.html").as_uri())
    assert axe(browser) == []
