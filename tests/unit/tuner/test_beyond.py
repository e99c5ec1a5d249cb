"""Tiles of our own kernels beyond the space: which are tried, at which batch sizes, in which order."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from moegate.errors import RecordError
from tuner.defaults import default_for
from tuner.effort import EFFORTS
from tuner.prior import Beyond, beyond
from tuner.problem import Problem
from tuner.spaces import space_for
from tuner.strategies.base import Task
from tuner.strategies.racing import Race

ROOT = Path(__file__).resolve().parents[3]
OWN = json.loads((ROOT / "tuner/prior/own.json").read_text())

# How many are tried up to each number of tokens, and the first hex digits of the sha256 of their lines: what was tried
# when the kernels came, one list in code for each.
TRIED = [
    ("bfloat16", None, {4: (18, "fd23f4716ed8c396"), 256: (2, "e3d94b9e0c302534")}),
    ("fp8_w8a8", None, {4: (4, "7508f86b665d2a69")}),
    ("fp8_w8a8", (128, 128), {4: (12, "c261863aebf0c681"), 256: (2, "ca734ee8432d4079")}),
]


def _race(dtype: str, block: tuple[int, int] | None, size: int) -> Race:
    p = Problem("fused_experts", 64, 896, 1280, 6, dtype, block)
    task = Task(
        p, (size,), space_for(p.op, "nvidia"), EFFORTS["quick"],
        lambda m: default_for(p, "nvidia", "NVIDIA_H200", m), own=beyond(p.file_dtype, p.block_shape),
    )  # fmt: skip
    return Race(task, {}, size)


@pytest.mark.parametrize(("dtype", "block", "tried"), TRIED)
def test_the_same_are_tried_in_the_same_order(
    dtype: str, block: tuple[int, int] | None, tried: dict[int, tuple[int, str]]
) -> None:
    for size in (*range(1, 300), 512, 1024, 4096):
        count, digest = tried[min(limit for limit in tried if size <= limit)] if size <= max(tried) else (0, "")
        wanted = _race(dtype, block, size)._beyond()
        assert set(wanted) == {"up", "down"}
        for configs in wanted.values():
            lines = "\n".join(config.spell() for config in configs)
            assert (len(configs), hashlib.sha256(lines.encode()).hexdigest()[:16] if lines else "") == (count, digest)


def test_another_kernel_is_a_line_of_the_table(tmp_path: Path) -> None:
    line = {"kernel": "third", "up_to": 9, "values": {"GROUP_SIZE_M": 4}, "tiles": {"16bit": [[32, 16, 16, 2, 7]]}}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**OWN, "beyond": [*OWN["beyond"], line]}))
    known = beyond(None, None, path)
    assert known[:2] == beyond(None, None)
    assert [config.spell() for config in known[2].configs] == ["32x16x16 g4 w2 s7"]
    space = space_for("fused_experts", "nvidia")
    tile, problem = known[2].configs[0], Problem("fused_experts", 8, 64, 64, 2, "bfloat16")
    task = Task(problem, (9,), space, EFFORTS["quick"], lambda m: tile, own=known)
    assert task.beyond(tile)
    assert tile in task.beyond_at(9)
    assert tile not in task.beyond_at(10)
    assert beyond("fp8_w8a8", None, path)[2].configs == ()


def test_what_selects_a_kernel_by_itself_is_its_own_wherever_it_was_recorded() -> None:
    singles, streams = beyond(None, None)
    other = singles.configs[0].with_(num_stages=7)
    recorded = {other, *singles.configs[:2], streams.configs[1], streams.configs[1].with_(num_stages=5)}
    assert singles.among(recorded) == tuple(sorted([other, *singles.configs[:2]]))
    assert streams.among(recorded) == (streams.configs[1],)
    assert Beyond("none", 1, ()).among(recorded) == ()


@pytest.mark.parametrize(
    "damage", [{"schema": 1}, {"fields": None}, {"beyond": [{"kernel": "x"}]}, {"beyond": [3]}, {"beyond": None}]
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**OWN, **damage}))
    with pytest.raises(RecordError, match=r"own\.json: is "):
        beyond(None, None, path)


def test_the_table_names_the_pages_that_tell_of_its_kernels() -> None:
    pages = re.findall(r"docs/\w+\.md", OWN["source"])
    assert pages == ["docs/large_rows.md", "docs/kernels.md", "docs/streamed_weights.md"]
    for page in pages:
        assert "BLOCK_SIZE_M" in (ROOT / page).read_text()
