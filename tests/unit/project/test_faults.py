"""The page of faults names every one, and for each a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("faults.md", "threat-model.md")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: str) -> list[list[str]]:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_every_fault_of_the_list_is_there() -> None:
    numbered = [row for row in rows("faults.md") if row[0].isdigit()]
    assert [int(row[0]) for row in numbered] == list(range(1, 25))
    assert all(_TEST.search(row[3]) for row in numbered)


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_it_names_exist(page: str) -> None:
    named = set(_TEST.findall((ROOT / "docs" / page).read_text()))
    assert len(named) > 10
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_the_invariants_are_those_that_the_harness_checks() -> None:
    listed = {row[0]: row[1] for row in rows("faults.md") if re.fullmatch("[a-i]", row[0])}
    text = (ROOT / "tests/faults/harness/check.py").read_text()
    assert listed == dict(re.findall(r"(?m)^\| ([a-i]) \| (.*) \|$", text))
    assert len(listed) == 9
