"""The pages are held to the code: links lead somewhere, tables name what exists, marked commands run."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_RUN = re.compile(r"^```console run\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if "://" in link or link.startswith("#"):
            continue
        assert (page.parent / link.split("#")[0]).exists(), link


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in _LINK.findall(index.read_text())}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} <= linked


def test_tables_and_readers_exist() -> None:
    found = re.findall(r"`([\w.]+):(\w+)`", (ROOT / "docs" / "tables.md").read_text())
    assert len(found) >= 30
    for module, attribute in found:
        assert hasattr(importlib.import_module(module), attribute), f"{module}:{attribute}"


def commands() -> list[tuple[str, str]]:
    return [
        (name(page), line.removeprefix("$ "))
        for page in PAGES
        for block in _RUN.findall(page.read_text())
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_that_can_run_here_run(page: str, command: str) -> None:
    argv = shlex.split(command)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"(?ms)^```console.*?^```", text) + re.findall(r"`([^`\n]+)`", text):
            for target in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", block):
                assert target in targets, f"{name(page)}: make {target}"


def test_make_help_lists_every_target_in_two_columns() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = [re.fullmatch(r"  make ([a-z-]+)( +)(\S.*)", line) for line in done.stdout.splitlines()]
    assert all(rows), done.stdout
    assert {row[1] for row in rows if row} == set(re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text()))
    assert len({row.start(3) for row in rows if row}) == 1, done.stdout


def test_the_changelog_names_the_version() -> None:
    version = re.search(r'(?m)^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{version[1]}]" in text
