"""The compile gate: how compiled facts become findings, whose Triton they are from, and what is remembered.

Most rows are given here, in the form that `tuner compile` writes; one test asks the real compiler.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from moegate.configs import ConfigKey
from moegate.errors import UsageError
from moegate.records.findings import CheckResult
from orchestrator.check import targets
from orchestrator.check.output import as_json, as_text
from orchestrator.check.run import Options, run_check

KEY = ConfigKey(64, 896, "NVIDIA_H200")
SAME = f"triton_{version('triton').split('+')[0].replace('.', '_')}"


class Compiler:
    """Answers for every batch size 16 of every staged file, and remembers what it was asked."""

    def __init__(self, **row: Any) -> None:
        self.row = row
        self.asked: list[list[str]] = []
        self.wanted: list[list[str]] = []

    def __call__(self, folder: Path, files: list[str], wanted: list[str]) -> list[dict[str, Any]]:
        self.asked.append(files)
        self.wanted.append(wanted)
        base = {"batch_size": 16, "target": wanted[0], "triton": version("triton"), "status": "ok"}
        return [{"file": name, **base, **self.row} for name in files]


@pytest.fixture
def gate(repo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(compiler: Compiler, wanted: str = "sm_90", **options: Any) -> CheckResult:
        monkeypatch.setattr(targets, "_run", compiler)
        return run_check(Options(configs=(repo.configs,), targets=(wanted,), start=repo.root, **options))

    return run


@pytest.mark.parametrize(
    ("row", "rule", "severity"),
    [
        ({"status": "failed", "error": "out of registers"}, "compile-failed", "error"),
        ({"shared": 300_000}, "smem-exceeds", "error"),
        ({"spills": 64}, "spills", "warning"),
        ({"block_loads": False}, "block-io-lost", "warning"),
    ],
)
def test_facts_become_findings_on_the_line_of_their_batch_size(
    row: dict[str, Any], rule: str, severity: str, gate: Any, repo: Any
) -> None:
    if SAME != "triton_3_8_0":
        (repo.configs / "triton_3_8_0").rename(repo.configs / SAME)
    result = gate(Compiler(**row))
    found = [item for item in result.findings if item.rule == rule]
    assert len(found) == 3  # the H200's three files, not the B200's
    assert {item.severity for item in found} == {severity}
    for item in found:
        assert '"16"' in (repo.root / item.file).read_text().splitlines()[item.line - 1]


def test_what_came_to_no_compiler_is_said_on_its_own_line(gate: Any, repo: Any) -> None:
    result = gate(Compiler(status="failed", error="key 'x' is no batch size", batch_size=None, line=7, triton=None))
    found = [item for item in result.findings if item.rule == "compile-failed"]
    assert {(item.line, item.message) for item in found} == {(7, "sm_90: key 'x' is no batch size")}


def test_another_triton_warns_and_never_fails(gate: Any) -> None:
    result = gate(Compiler(status="failed", error="x", triton="3.1.0"))
    found = [item for item in result.findings if item.rule == "compile-failed"]
    assert found
    assert {item.severity for item in found} == {"warning"}
    assert not result.failed
    assert "the file is for Triton 3.8.0" in found[0].message


def test_good_facts_say_nothing_and_are_remembered(gate: Any, repo: Any) -> None:
    compiler = Compiler(shared=1000, spills=0, block_loads=True)
    assert gate(compiler).findings == ()
    assert gate(compiler).findings == ()
    assert len(compiler.asked) == 1
    repo.edit(repo.file(KEY), '"BLOCK_SIZE_N": 64', '"BLOCK_SIZE_N": 128')
    gate(compiler)
    assert [len(names) for names in compiler.asked] == [3, 1]


def test_what_was_compiled_is_said_in_a_line(gate: Any) -> None:
    compiler = Compiler()
    first, again = gate(compiler), gate(compiler)
    done = as_json(first)["compiled"]
    assert (done["kernels"], done["files"], done["known"], list(done["targets"])) == (3, 3, 0, ["sm_90"])
    assert re.search(r"^compiled 3 kernels of 3 files for sm_90 in \d+\.\d s$", as_text(first), re.M)
    assert "compiled 3 kernels of 3 files for sm_90 in 0.0 s, 3 of the files known from before\n" in as_text(again)
    assert "nothing compiled: no file to check is of a device of gfx942\n" in as_text(gate(compiler, "gfx942"))
    assert as_json(gate(Compiler(status="skipped"), "sm_100"))["compiled"]["kernels"] == 0


def test_nothing_is_said_of_compiling_where_nobody_asked(repo: Any) -> None:
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    assert as_json(result)["compiled"] is None
    assert "compiled" not in as_text(result)


def test_against_a_base_only_changed_files_are_compiled(gate: Any, repo: Any) -> None:
    compiler = Compiler()
    gate(compiler, base="git:main")
    assert compiler.asked == []
    repo.edit(repo.file(KEY, "down"), '"BLOCK_SIZE_N": 128', '"BLOCK_SIZE_N": 64')
    gate(compiler, base="git:main")
    assert [len(names) for names in compiler.asked] == [1]
    assert compiler.asked[0][0].endswith("NVIDIA_H200_down.json")


def test_targets_are_checked(gate: Any) -> None:
    compiler = Compiler()
    gate(compiler, "sm_100")
    assert len(compiler.asked[0]) == 1
    for nobodys in ("sm_70", "cpu", "npu", "sm_", "h200"):
        with pytest.raises(UsageError, match="no known device") as error:
            gate(compiler, nobodys)
        assert error.value.field == "targets"
        assert "sm_90" in str(error.value.fix)


@pytest.mark.parametrize("word", ["sm_90", "sm90", " SM_90 ", "cuda-sm90", "CUDA-SM90"])
def test_a_target_is_meant_by_any_of_its_names(word: str, gate: Any) -> None:
    compiler = Compiler()
    assert as_json(gate(compiler, word))["compiled"]["files"] == 3
    assert compiler.wanted == [["sm_90"]]


def test_a_link_to_another_file_is_compiled_too(gate: Any, repo: Any) -> None:
    key = ConfigKey(32, 896, "NVIDIA_H200")
    repo.file(key).symlink_to(repo.file(KEY).name)
    compiler = Compiler()
    assert as_json(gate(compiler))["compiled"]["kernels"] == 4
    assert str(repo.file(key)) in compiler.asked[0]


@pytest.mark.slow
def test_a_real_compiler_is_asked_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config whose pipeline needs more shared memory than the lower bound can tell."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    big = {
        "BLOCK_SIZE_M": 256,
        "BLOCK_SIZE_N": 256,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 8,
        "num_stages": 4,
    }
    path = tmp_path / "configs" / SAME / "E=8,N=128,device_name=NVIDIA_H200.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"64": big}, indent=4))
    options = Options(configs=(tmp_path,), targets=("sm_90",), start=tmp_path)
    assert not run_check(Options(configs=(tmp_path,), start=tmp_path)).findings
    found = {item.rule: item for item in run_check(options).findings}
    assert set(found) == {"smem-exceeds", "spills"}
    assert found["smem-exceeds"].severity == "error"
    assert '"64"' in path.read_text().splitlines()[found["smem-exceeds"].line - 1]
    monkeypatch.setattr(targets, "_run", None)  # a second run asks nobody
    assert {item.rule for item in run_check(options).findings} == set(found)
