"""What the compiler makes of the kernel that streams weights on sm_90, with no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere.async_copy")

from tests.unit.xkernels.test_large_compile import arrivals_in_order, arrivals_that_move, compiled
from xkernels.device.cuda import served

SHARED = 228 * 1024  # bytes of a multiprocessor, 1024 of which each program loses


@pytest.mark.slow
@pytest.mark.skipif("wgmma" not in served(frozenset({"wgmma"})), reason="this Triton does not compile the kernel")
@pytest.mark.parametrize(
    ("kind", "width", "stages", "programs"),
    [
        ("none", 64, 10, 1),
        ("none", 128, 6, 1),
        ("none", 64, 11, 1),
        ("fp8_block", 128, 12, 1),
        ("fp8_block", 128, 10, 1),
        ("fp8_block", 128, 8, 2),
    ],
)
def test_both_projections_on_hopper(kind: str, width: int, stages: int, programs: int, tmp_path: Path) -> None:
    config = {"GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": stages}
    made = compiled(tmp_path, "sm_90", kind, (16, width, 128), **config)
    rows = [row for row in made if row["name"] == "stream_gemm"]
    assert len(rows) == 2
    for row in rows:
        facts, ptx, sass = row["facts"], row["ptx"], row["sass"]
        assert programs * (facts["shared"] + 1024) <= SHARED
        assert facts["block_loads"]
        assert facts["spills"] == 0
        assert not re.search(r"\b(LDL|STL)\b", sass)
        assert programs * facts["threads"] * facts["registers"] <= 65536
        assert arrivals_in_order(ptx) >= 1
        assert arrivals_that_move(row["ir"]) >= 1
        assert sass.count("WARPGROUP.DEPBAR") <= ptx.count("wgmma.wait_group")
        assert ptx.count("cp.async.bulk.tensor") % 2 == 0  # 256 bytes of a weight row at once
    # where the tiles' look-ups are old enough, the loader waits for no kernel
    waits = [row["ptx"].count("griddepcontrol.wait") for row in rows]
    assert waits == ([3, 2] if kind == "none" else [2, 2])


@pytest.mark.slow
def test_elsewhere_the_config_means_the_ordinary_kernels(tmp_path: Path) -> None:
    made = compiled(tmp_path, "sm_100", "none", (16, 64, 128), GROUP_SIZE_M=1, num_warps=4, num_stages=6)
    assert {"up_gemm", "down_gemm"} <= {row["name"] for row in made}
    assert "stream_gemm" not in {row["name"] for row in made}
