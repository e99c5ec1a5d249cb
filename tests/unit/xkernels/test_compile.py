"""Every kernel compiles for the four targets of the standard wheel, with no GPU here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
ENV = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
COMMAND = (
    "import sys; from pathlib import Path; from tuner.commands.compile import run;"
    "sys.exit(run(targets=sys.argv[1], variants=sys.argv[2], out=Path(sys.argv[3]), jobs=2, as_json=True,"
    " configs=Path(sys.argv[4]) if len(sys.argv) > 4 else None))"
)


def compiled(tmp: Path, *args: str, code: int = 0) -> dict[str, Any]:
    out = tmp / "facts.json"
    argv = [sys.executable, "-P", "-c", COMMAND, args[0], args[1], str(out), *args[2:]]
    done = subprocess.run(argv, env=ENV, cwd=tmp, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout)
    assert document == json.loads(out.read_text())
    return document


def launched_kernels() -> set[str]:
    """Kernels that host code of the operators launches: `_k.name[grid](...)`."""
    names: set[str] = set()
    for path in (ROOT / "kernels/xkernels/ops").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "from xkernels.ops._details import" in text:
            names |= set(re.findall(r"\b_k\.(\w+)\[", text))
    return names


@pytest.mark.slow
def test_every_kernel_for_every_target(tmp_path: Path) -> None:
    rows = compiled(tmp_path, ",".join(TARGETS), "basic")["facts"]
    bad = [row for row in rows if row["status"] != "ok"]
    assert not bad, bad
    for target in TARGETS:
        mine = [row for row in rows if row["target"] == target]
        missing = launched_kernels() & OWN - {row["kernel"] for row in mine}
        assert not missing, (target, missing)
        assert all(row["fits"] and row["registers"] and row["spills"] is not None for row in mine)
        loads = {row["block_loads"] for row in mine if row["variant"] == "experts bf16 descriptors"}
        assert (True in loads) == target.startswith("sm_"), (target, loads)


# The kernels of this library's single-device operators.
OWN = {
    "align_one", "count", "place", "choose", "gated", "sum_slots", "up_gemm", "down_gemm", "group_quant", "row_quant",
    "static_quant", "fp8_gemm", "store_kv", "decode_part", "decode_sum", "add_norm",
    "rotate", "rotate_store", "router_dot", "norm_linear", "norm_rows", "row_logits", "norm_gate", "choose_add",
    "new_token_part", "new_token_out", "up_rows", "down_rows",
}  # fmt: skip


def test_names_are_the_kernels() -> None:
    assert launched_kernels() >= OWN


def test_configs_of_a_folder_and_a_target_without_a_compiler(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    good = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4,
            "num_stages": 2}  # fmt: skip
    large = {**good, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_stages": 4, "num_warps": 8}
    name = "E=64,N=896,device_name=NVIDIA_H200.json"
    single = {**good, "BLOCK_SIZE_M": 1}
    (folder / name).write_text(json.dumps({"1": good, "2": good, "4": single, "64": large}))
    (folder / "E=64,N=896,device_name=NVIDIA_H200,dtype=int4_w4a16.json").write_text(json.dumps({"1": good}))
    document = compiled(tmp_path, "sm_90,bmg", "all", str(tmp_path / "configs"), code=1)
    assert document["counts"] == {"skipped": 1, "ok": 3, "over-shared": 1}
    rows = {(Path(row["file"]).name, row["batch_size"], row["target"]): row for row in document["facts"]}
    assert rows[name, 1, "sm_90"]["status"] == "ok"
    assert rows[name, 1, "sm_90"]["shared"] == rows[name, 2, "sm_90"]["shared"]
    assert rows[name, 4, "sm_90"]["kernel"] == "up_rows"
    assert rows[name, 64, "sm_90"]["shared"] > 232448  # three of these stages do not fit an H200
    skipped = [row for row in document["facts"] if row["status"] == "skipped"]
    assert len(skipped) == 1
    assert "int4_w4a16" in skipped[0]["error"]
    only = compiled(tmp_path, "bmg", "silu_and_mul")["facts"]
    assert only[0]["status"] in ("skipped", "ok")
    assert only[0]["status"] == "ok" or "triton-xpu" in only[0]["error"]


def test_refusals(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", COMMAND, "sm_91", "basic", str(tmp_path / "x.json")]
    done = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "unknown target 'sm_91'" in done.stderr
    argv[4] = "sm_90"
    done = subprocess.run(argv, env={**ENV, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip
    assert "TRITON_INTERPRET is set" in done.stderr


@pytest.mark.slow
def test_another_environment_compiles_what_ours_cannot(tmp_path: Path) -> None:
    # our own Python in the part: it keeps its Triton and finds our packages behind its own
    code = (
        "import sys, json; from pathlib import Path; from tuner.compile.foreign import Foreign;"
        "from tuner.compile.targets import find; other = Foreign(Path(sys.executable));"
        "print(json.dumps([other.reason(find('bmg')), other.variants(find('sm_90'), ['silu_and_mul'], 1)]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env=ENV, cwd=tmp_path, capture_output=True, text=True,
                          timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    reason, rows = json.loads(done.stdout)
    assert reason is None or "no intel backend" in reason
    assert [(row["kernel"], row["status"]) for row in rows] == [("gated", "ok")]


def test_no_interpreter_for_another_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moegate.errors import UsageError
    from tuner.compile.foreign import Foreign

    with pytest.raises(UsageError, match="no Python interpreter"):
        Foreign(tmp_path / "python")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho nothing here >&2\nexit 3\n")
    broken.chmod(0o755)
    from tuner.compile.targets import find

    with pytest.raises(UsageError, match="cannot compile: nothing here"):
        Foreign(broken).reason(find("bmg"))
    monkeypatch.chdir(tmp_path)  # a name alone is a file here, not a program on the PATH
    with pytest.raises(UsageError, match="cannot compile: nothing here"):
        Foreign(Path("broken")).reason(find("bmg"))
    broken.write_text("#!/bin/sh\nprintf '\\377 odd\\n' >&2\nexit 3\n")
    with pytest.raises(UsageError, match=r"cannot compile: .* odd"):
        Foreign(broken).reason(find("bmg"))
    broken.write_text('#!/bin/sh\necho nothing > "$5"\n')
    with pytest.raises(UsageError, match="did not answer in JSON"):
        Foreign(broken).reason(find("bmg"))
    with pytest.raises(UsageError, match="no Python interpreter"):
        Foreign(tmp_path)
