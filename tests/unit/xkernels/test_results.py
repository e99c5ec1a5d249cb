"""The page of measured results says what the JSON files say, and each file says where it comes from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docs/results").glob("h200_*.json"))


def test_page_is_generated_from_the_files() -> None:
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "tests/gpu/results_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fresh = module.render()
    assert module.PAGE.read_text(encoding="utf-8") == fresh, "run python tests/gpu/results_page.py"
    assert "compiled only: sm_100" in fresh


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_results_name_their_origin(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for word in ("device", "torch", "triton", "date", "command"):
        assert content[word]
