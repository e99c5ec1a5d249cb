"""What the compiler makes of the kernel for many rows on sm_90, with no GPU: registers, spills, order of arrivals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere.async_copy")

from xkernels.device.cuda import served

TILE = {"GROUP_SIZE_M": 16, "num_warps": 8, "num_stages": 4, "USE_TMA": True}
COMMAND = """
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
from tuner.compile.facts import captured, facts_of
from tuner.compile.targets import SimulatedDevice, activate, find
from tuner.compile.variants import experts_call
from xkernels.device import simulated

target, (kind, tile, extra) = find(sys.argv[1]), json.loads(sys.argv[2])
activate(target)
with captured() as built, simulated(SimulatedDevice(target)):
    experts_call(target, kind=kind, tile=tuple(tile), extra=extra, sizes=(64, 1280, 896), topk_=6)
tool, out = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm", []
for name, kernel in built:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    texts = {"ptx": kernel.asm["ptx"], "ir": str(kernel.asm["ttgir"]), "sass": code}
    out.append({"name": name, **texts, "facts": facts_of(kernel, target)})
print(json.dumps(out))
"""


def compiled(tmp: Path, target: str, kind: str, tile: tuple[int, int, int], **extra: Any) -> list[dict[str, Any]]:
    """The layer's kernels for a target, both projections with one tile."""
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    argv = [sys.executable, "-P", "-c", COMMAND, target, json.dumps([kind, tile, {**TILE, **extra}])]
    done = subprocess.run(argv, env=env, cwd=tmp, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.skipif("wgmma" not in served(frozenset({"wgmma"})), reason="this Triton does not compile the kernel")
@pytest.mark.parametrize(("kind", "step", "stages"), [("none", 64, 4), ("none", 32, 8), ("fp8_block", 128, 4)])
def test_both_projections_on_hopper(kind: str, step: int, stages: int, tmp_path: Path) -> None:
    made = compiled(tmp_path, "sm_90", kind, (128, 256, step), num_stages=stages)
    rows = [row for row in made if row["name"] == "large_gemm"]
    assert len(rows) == 2
    for row in rows:
        facts, ptx, sass = row["facts"], row["ptx"], row["sass"]
        assert facts["fits"]
        assert facts["block_loads"]
        assert facts["spills"] == 0
        assert not re.search(r"\b(LDL|STL)\b", sass)
        # three groups of four warps share the register file: what each asks for, the first one under another word
        shares = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
        assert shares & {24, 56}
        assert (2 * max(shares & {224, 240}) + min(shares & {24, 56})) * 128 <= 65536
        assert arrivals_in_order(ptx) >= 8
        assert arrivals_that_move(row["ir"]) >= 3  # both groups' products, and the steps that the second one skips
        # products that run one at a time wait more often than was asked for
        assert sass.count("WARPGROUP.DEPBAR") <= ptx.count("wgmma.wait_group")


def arrivals_in_order(ptx: str) -> int:
    """Number of arrivals at barriers; one thread makes each for its group, and the others must be as far before it."""
    synced, arrivals = True, 0
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.sync|bar\.warp\.sync", line):
            synced = True
        elif re.search(r"ld\.shared|st\.shared|wgmma\.wait_group|mbarrier\.try_wait|fence\.proxy", line):
            synced = False
        elif "mbarrier.arrive.shared::cta" in line:
            assert synced, line
            arrivals += 1
    return arrivals


def arrivals_that_move(ir: str) -> int:
    """Number of arrivals in counting loops; each at a barrier that the step chooses, none at one and the same."""
    lines, arrivals = ir.splitlines(), 0
    for begin, head in enumerate(lines):
        if "scf.for" not in head:
            continue
        indent = " " * (len(head) - len(head.lstrip())) + "}"
        body = lines[begin : next(i for i in range(begin, len(lines)) if lines[i].startswith(indent))]
        chosen = dict(re.findall(r"(%\w+) = ttg.memdesc_index [^\[\n]+\[(%\w+)\]", "\n".join(body)))
        own = set(re.findall(r"^\s*(%\w+) =", "\n".join(body[1:]), re.MULTILINE)) | set(re.findall(r"(%\w+) = %", head))
        for line in body:
            if at := re.search(r"ttng.arrive_barrier (%\w+)", line):
                assert chosen[at[1]] in own, line
                arrivals += 1
    return arrivals


@pytest.mark.slow
def test_elsewhere_the_config_means_the_ordinary_kernels(tmp_path: Path) -> None:
    names = {row["name"] for row in compiled(tmp_path, "sm_100", "none", (128, 256, 64), num_stages=2)}
    assert "large_gemm" not in names
    assert {"up_gemm", "down_gemm"} <= names
