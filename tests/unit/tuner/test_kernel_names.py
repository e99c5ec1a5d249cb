"""Facts of kernels that are stated once: their names, and the values that an engine's kernel does not take."""

from __future__ import annotations

import re
from pathlib import Path

from moegate.configs.values import refused_by
from tuner.kernel_names import EXPERTS, GEMMS, LINEAR, SHARED, STORE, kernels_of

ROOT = Path(__file__).resolve().parents[3]
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}


def _functions(folder: Path, name: str) -> list[Path]:
    found = (path for path in folder.rglob("*.py") if re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE))
    return sorted(found)


def test_every_kernel_that_is_named_exists() -> None:
    assert set(EXPERTS) == {*kernels_of("up"), *kernels_of("down")}
    assert set(kernels_of("up")) & set(kernels_of("down")) == set(SHARED)
    for name in (*EXPERTS, LINEAR, STORE):
        assert len(_functions(ROOT / "kernels/xkernels/ops/_details", name)) == 1, name


def test_their_names_stand_in_one_place_of_the_tuner() -> None:
    """Strings alone: calls of the kernels themselves are no names."""
    for name in (*GEMMS.values(), *SHARED, "up_rows", "down_rows", LINEAR):
        stated = [p.name for p in (ROOT / "tuner").rglob("*.py") if f'"{name}"' in p.read_text()]
        assert stated == ["kernel_names.py"], name


def test_blocks_of_one_row_are_refused_by_vllm_alone() -> None:
    single = {**TILE, "BLOCK_SIZE_M": 1}
    assert refused_by("vllm", single) == ["BLOCK_SIZE_M 1"]
    assert [refused_by(engine, single) for engine in ("moegate", "sglang")] == [[], []]
    assert refused_by("vllm", {**TILE, "BLOCK_SIZE_M": 8}) == []
    assert refused_by("vllm", {**TILE, "USE_TMA": True}) == []  # no parameter of its kernel: dropped, not refused
