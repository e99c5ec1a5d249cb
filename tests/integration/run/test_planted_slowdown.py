"""A slowdown committed to a real kernel is found through arms with a `source`; the same matrix without it passes.

The GPU variant is the script itself, tests/gpu/planted_slowdown.py. Here the dose is large and the margin wide, because
the interpreter's timings share this machine with everything else.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "gpu" / "planted_slowdown.py"
OPTIONS = "--device=cpu --model=examples/models/tiny-moe --dtype=float32 --graph=eager --sizes=1 --dose=30"
DESIGN = "--screen=1 --confirm=2 --margin=50% --q=30%"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("planted_slowdown", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_committed_slowdown_is_found_and_an_unchanged_commit_is_not(script: Any, tmp_path: Path) -> None:
    script.find(script.arguments(["find", f"--out={tmp_path}", *OPTIONS.split(), *DESIGN.split()]))
    runs = json.loads((tmp_path / "planted.json").read_text())["runs"]
    planted, unchanged = runs["planted"], runs["unchanged"]
    assert (planted["verdict"], planted["exit"]) == ("regressed", 1), planted
    assert len(set(planted["kernel_hashes"].values())) == 2
    assert planted["environment"]["moegate"].count("+g") == 2, "both commits are named"
    assert unchanged["verdict"] != "regressed", unchanged
    assert unchanged["exit"] == 0, unchanged
    assert len(set(unchanged["kernel_hashes"].values())) == 1


def test_the_script_knows_the_kernel_that_it_slows_down(script: Any) -> None:
    text = (script.ROOT / script.KERNEL).read_text()
    slow = script.plant(text, 3)
    assert slow.count("range(steps + 3)") == 1
    assert script.plant(text, 0) == text
    with pytest.raises(ValueError, match="has changed"):
        script.plant(slow, 1)
