"""The page of measured results says what the JSON files say, and each file says where it comes from."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.dispatch.rows import ROWS

ROOT = Path(__file__).parents[3]
FILES = sorted(p for stem in ("h200", "bmg") for p in (ROOT / "docs/results").glob(f"{stem}_*.json"))
SIDECARS = sorted((ROOT / "kernels/configs").rglob("*.provenance.json"))


def pages() -> dict[str, Callable[[], str]]:
    spec = importlib.util.spec_from_file_location("results_pages", ROOT / "scripts/results_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Callable[[], str]] = module.PAGES
    return made


@pytest.mark.parametrize("name", sorted(pages()))
def test_pages_are_generated_from_the_files(name: str) -> None:
    fresh = pages()[name]()
    kept = (ROOT / "docs/results" / name).read_text(encoding="utf-8")
    assert kept == fresh, "run python scripts/results_pages.py"


def test_every_page_is_generated_and_compile_only_is_told() -> None:
    assert {path.name for path in (ROOT / "docs/results").glob("*.md")} == set(pages())
    assert "compiled only: sm_100" in pages()["kernels.md"]()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_results_name_their_origin(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for word in ("device", "torch", "triton", "date"):
        assert content[word]
    assert content.get("command") or content.get("how")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_command_is_one(path: Path) -> None:
    """What is printed as a command can be typed; how else something was measured is said in words."""
    content = json.loads(path.read_text(encoding="utf-8"))
    words = shlex.split(content.get("command", "python"), comments=True)
    program = next(word for word in words if "=" not in word)
    known = ("python", "tuner", "orchestrator", "serving", "make", "taskset")
    assert program in known or program.endswith(".py")
    if "how" not in content:  # which says where else it is
        named = [word for word in words if word.startswith(("tests/", "scripts/"))]
        assert [word for word in named if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("path", FILES + SIDECARS, ids=lambda p: p.stem)
def test_commands_name_no_folder_of_the_machine_that_they_ran_on(path: Path) -> None:
    command = json.loads(path.read_text(encoding="utf-8")).get("command", "")
    assert not re.search(r"(^|[\s=])[/~]", command)


def test_the_dispatch_table_states_the_measured_ratios() -> None:
    row = next(row for row in ROWS if (row.op, row.backend) == ("fused_experts", "triton"))
    bf16, fp8 = (
        json.loads((ROOT / f"docs/results/h200_moe_{mode}.json").read_text(encoding="utf-8"))["geomean"]
        for mode in ("bf16", "fp8")
    )
    assert f"{bf16:.2f} (bf16) and {fp8:.2f} (fp8) times as fast" in row.reason
