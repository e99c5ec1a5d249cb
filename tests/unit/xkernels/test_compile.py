"""Every kernel compiles for the four targets of the standard wheel, with no GPU here."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tuner.compile.targets import SimulatedDevice, find

ROOT = Path(__file__).parents[3]
DETAILS = ROOT / "kernels/xkernels/ops/_details"
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


@dataclass(frozen=True)
class Jitted:
    """A function that a compiler for devices reads: `language` of its decorator (`helper` is never launched)."""

    name: str
    language: str
    calls: frozenset[str]  # of names of its own module, and of imports


def jitted(source: str) -> Iterator[Jitted]:
    """The jitted functions of a module, decorated with `triton.jit`, `gluon.jit` or `helper`."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        words = {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list}
        found = words & {"triton.jit", "gluon.jit", "helper"}
        if found:
            names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            local = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {a.arg for a in node.args.args}
            used = {n.id for n in names if isinstance(n.ctx, ast.Load)} - local
            yield Jitted(node.name, found.pop().removesuffix(".jit"), frozenset(used))


def kernels(sources: Mapping[str, str]) -> dict[str, str]:
    """Kernels (name -> language) of modules by name: what is jitted and called by nothing that is."""
    called: set[tuple[str, str]] = set()
    for module, source in sources.items():
        imported = {
            alias.asname or alias.name: ((node.module or "").rsplit(".", 1)[-1], alias.name)
            for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        called |= {imported.get(name, (module, name)) for one in jitted(source) for name in one.calls}
    return {
        one.name: one.language
        for module, source in sources.items() for one in jitted(source)
        if one.language != "helper" and (module, one.name) not in called
    }  # fmt: skip


def launched(source: str, among: Collection[str]) -> set[str]:
    """Names of `among` that host code launches: `name[grid](...)`, of a module or not."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    heads = [call.value for call in calls if isinstance(call, ast.Subscript)]
    return {h.attr if isinstance(h, ast.Attribute) else h.id for h in heads if isinstance(h, ast.Attribute | ast.Name)}\
        & set(among)  # fmt: skip


def our_kernels() -> dict[str, str]:
    return kernels({path.stem: path.read_text(encoding="utf-8") for path in sorted(DETAILS.glob("*.py"))})


def expected(target: str) -> set[str]:
    """Every kernel that can be launched on a target: those in Gluon are for targets with wgmma."""
    gluon = "wgmma" in SimulatedDevice(find(target)).features()
    return {name for name, language in our_kernels().items() if gluon or language != "gluon"}


@pytest.mark.slow
def test_every_kernel_for_every_target(tmp_path: Path) -> None:
    rows = compiled(tmp_path, ",".join(TARGETS), "basic")["facts"]
    bad = [row for row in rows if row["status"] != "ok"]
    assert not bad, bad
    for target in TARGETS:
        mine = [row for row in rows if row["target"] == target]
        assert {row["kernel"] for row in mine} == expected(target), target
        assert all(row["fits"] and row["registers"] and row["spills"] is not None for row in mine)
        loads = {row["block_loads"] for row in mine if row["variant"] == "experts bf16 descriptors"}
        assert (True in loads) == target.startswith("sm_"), (target, loads)


def test_every_kernel_is_found_in_the_sources() -> None:
    found = our_kernels()
    assert {"up_gemm": "triton", "large_gemm": "gluon", "route": "triton"}.items() <= found.items()
    hosts = (ROOT / "kernels/xkernels/ops").rglob("*.py")
    assert set().union(*(launched(path.read_text(encoding="utf-8"), found) for path in hosts)) == set(found)


def test_every_kernel_was_compiled_for_bmg() -> None:
    facts = json.loads((ROOT / "docs/results/bmg_compile.json").read_text())["facts"]
    compiled = {row["kernel"] for row in facts if row["status"] == "ok"}
    assert compiled == expected("bmg"), "docs/kernels.md, `Compiling without a GPU`, says how to compile for bmg"


def test_what_a_kernel_calls_is_none() -> None:
    sources = {
        "one": "@helper\ndef half(x): return x\n@triton.jit\ndef part(x): return half(x)\n"
        "@triton.jit(do_not_specialize=['n'])\ndef whole(n): part(n)",
        "two": "from xkernels.ops._details.one import part as piece\n@gluon.jit\ndef other(n): piece(n)\n"
        "@triton.jit\ndef place(count): place_ = count\n@triton.jit\ndef count(n): place = n; return place",
    }
    assert kernels(sources) == {"whole": "triton", "other": "gluon", "place": "triton", "count": "triton"}
    assert launched("whole[(1,)](2)\n_k.other[grid](1)\nrows[0](1)\nplace(3)", kernels(sources)) == {"whole", "other"}


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
