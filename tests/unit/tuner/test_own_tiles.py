"""Tiles of our own kernels beyond the space: which are tried, at which batch sizes, in which order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moegate.errors import RecordError
from tuner.defaults import default_for
from tuner.effort import EFFORTS
from tuner.prior import OwnTiles, own_tiles
from tuner.problem import Problem
from tuner.spaces import space_for
from tuner.strategies.base import Task
from tuner.strategies.racing import Race

ROOT = Path(__file__).resolve().parents[3]
OWN = json.loads((ROOT / "tuner/prior/own.json").read_text())

KINDS = [("bfloat16", None, "16bit"), ("fp8_w8a8", None, "fp8"), ("fp8_w8a8", (128, 128), "fp8_block")]


def _race(dtype: str, block: tuple[int, int] | None, size: int) -> Race:
    p = Problem("fused_experts", 64, 896, 1280, 6, dtype, block)
    task = Task(
        p, (size,), space_for(p.op, "nvidia"), EFFORTS["quick"],
        lambda m: default_for(p, "nvidia", "NVIDIA_H200", m), own=own_tiles(p.file_dtype, p.block_shape),
    )  # fmt: skip
    return Race(task, {}, size)


@pytest.mark.parametrize(("dtype", "block", "kind"), KINDS)
@pytest.mark.parametrize("size", [1, 4, 5, 8, 256, 257, 4096])
def test_what_the_table_lists_is_tried_in_its_order_up_to_its_number_of_tokens(
    dtype: str, block: tuple[int, int] | None, kind: str, size: int
) -> None:
    listed = [
        {**dict(zip(OWN["fields"], tile, strict=True)), **entry["values"]}
        for entry in OWN["beyond"]
        if size <= entry["up_to"]
        for tile in entry["tiles"].get(kind, [])
    ]
    assert bool(listed) == (size <= (4 if kind == "fp8" else 256))
    wanted = _race(dtype, block, size)._beyond()
    assert set(wanted) == {"up", "down"}
    for configs in wanted.values():
        assert [config.as_dict() for config in configs] == listed


def test_another_kernel_is_a_line_of_the_table(tmp_path: Path) -> None:
    line = {"kernel": "third", "up_to": 9, "values": {"GROUP_SIZE_M": 4}, "tiles": {"16bit": [[32, 16, 16, 2, 7]]}}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**OWN, "beyond": [*OWN["beyond"], line]}))
    known = own_tiles(None, None, path)
    assert known[:2] == own_tiles(None, None)
    assert [config.spell() for config in known[2].configs] == ["32x16x16 g4 w2 s7"]
    space = space_for("fused_experts", "nvidia")
    tile, problem = known[2].configs[0], Problem("fused_experts", 8, 64, 64, 2, "bfloat16")
    task = Task(problem, (9,), space, EFFORTS["quick"], lambda m: tile, own=known)
    assert task.beyond(tile)
    assert tile in task.beyond_at(9)
    assert tile not in task.beyond_at(10)
    assert own_tiles("fp8_w8a8", None, path)[2].configs == ()


def test_what_selects_a_kernel_by_itself_is_its_own_wherever_it_was_recorded() -> None:
    singles, streams = own_tiles(None, None)
    other = singles.configs[0].with_(num_stages=7)
    recorded = {other, *singles.configs[:2], streams.configs[1], streams.configs[1].with_(num_stages=5)}
    assert singles.among(recorded) == tuple(sorted([other, *singles.configs[:2]]))
    assert streams.among(recorded) == (streams.configs[1],)
    assert OwnTiles("none", 1, ()).among(recorded) == ()


@pytest.mark.parametrize(
    "damage", [{"schema": 1}, {"fields": None}, {"beyond": [{"kernel": "x"}]}, {"beyond": [3]}, {"beyond": None}]
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({**OWN, **damage}))
    with pytest.raises(RecordError, match=r"own\.json: is "):
        own_tiles(None, None, path)


def test_the_table_names_the_pages_that_tell_of_its_kernels() -> None:
    pages = re.findall(r"docs/\w+\.md", OWN["source"])
    assert pages == ["docs/large_rows.md", "docs/kernels.md", "docs/streamed_weights.md"]
    for page in pages:
        assert "BLOCK_SIZE_M" in (ROOT / page).read_text()
