"""Coverage, its ranking by stored gains, and the simulation of a Triton upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moegate import canonical
from moegate.configs import ConfigKey
from moegate.kernels import code_hash, hash_of, kernel_files
from moegate.records import ConfigTiming, Provenance, write
from moegate.records.provenance import sidecar_name
from orchestrator.check.gains import expected, read_gains
from orchestrator.check.output import as_text
from orchestrator.check.run import Options, run_check

KEY = ConfigKey(64, 896, "NVIDIA_H200")
NOW = kernel_files("fused_experts")
LINEAR = {"problem": {"op": "block_fp8_linear"}}
FP8 = ConfigKey(64, 896, "NVIDIA_H200", "fp8_w8a8", (128, 128))


def provenance(path: Path, winner: float, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "origin": "measured", "engine": "sglang", "date": "2026-10-01", "candidates": 640, "covered": 640,
        "config_sha256": canonical.file_digest(path),
        "timings": {str(size): ConfigTiming(winner, 100.0) for size in (1, 16)},
    }  # fmt: skip
    write(path.with_name(sidecar_name(path.name)), Provenance(**{**fields, **changes}))


def rows(repo: Any, *devices: str, **options: Any) -> list[dict[str, Any]]:
    result = run_check(Options(configs=(repo.configs,), engine="sglang", models=(repo.model,), devices=devices,
                               start=repo.root, **options))  # fmt: skip
    assert not result.failed
    return list(result.coverage)


def test_every_kind_of_answer(repo: Any) -> None:
    repo.write(
        repo.file(KEY.on("NVIDIA_H100_80GB_HBM3"), triton="triton_3_6_0"), json.loads(repo.file(FP8).read_text())
    )
    repo.write(
        repo.file(KEY.on("NVIDIA_A100-SXM4-80GB"), triton="triton_3_9_0"), json.loads(repo.file(KEY).read_text())
    )
    devices = ("NVIDIA_H200", "NVIDIA_B200", "NVIDIA_H100_80GB_HBM3", "NVIDIA_A100-SXM4-80GB", "NVIDIA_L40S",
               "Intel(R)_Arc(TM)_Pro_B60_Graphics")  # fmt: skip
    found = {row["device"]: row["result"] for row in rows(repo, *devices, triton="3.8.0", backend="triton")}
    assert found == {
        "NVIDIA_H200": "exact",
        "NVIDIA_B200": "up-config",
        "NVIDIA_H100_80GB_HBM3": "up-config",
        "NVIDIA_A100-SXM4-80GB": "up-config",
        "NVIDIA_L40S": "default",
        "Intel(R)_Arc(TM)_Pro_B60_Graphics": "default",
    }
    ups = {row["device"]: row["up"] for row in rows(repo, *devices, triton="3.8.0")}
    assert ups["NVIDIA_H100_80GB_HBM3"] == "older-triton"
    assert ups["NVIDIA_A100-SXM4-80GB"] == "newer-triton"
    auto = {row["device"]: row["result"] for row in rows(repo, "Intel(R)_Arc(TM)_Pro_B60_Graphics", triton="3.8.0")}
    assert auto == {"Intel(R)_Arc(TM)_Pro_B60_Graphics": "unreachable"}


def test_a_device_that_nobody_knows_is_said_to_be_one(repo: Any) -> None:
    options = Options(configs=(repo.configs,), engine="sglang", models=(repo.model,), start=repo.root,
                      devices=("NVIDIA_H200", "AMD_MI300X"), tps=(1, 2))  # fmt: skip
    lines = as_text(run_check(options)).splitlines()
    [note] = [line for line in lines if "note: " in line]
    assert lines.index(note) < next(n for n, line in enumerate(lines) if line.startswith("coverage of "))
    assert note.startswith("note: AMD_MI300X is not in the device table (near: AMD_Instinct_MI300X")


def test_what_is_worth_most_comes_first(repo: Any) -> None:
    provenance(repo.file(KEY), 50.0)
    provenance(repo.file(KEY.on("NVIDIA_B200")), 80.0)
    found = rows(repo, "NVIDIA_H200", "NVIDIA_B200", "NVIDIA_L40S", triton="3.8.0", backend="triton")
    assert [row["device"] for row in found] == ["NVIDIA_L40S", "NVIDIA_B200", "NVIDIA_H200"]
    assert found[0]["gain_from"] == "measured for this shape elsewhere (2 files)"
    assert found[2]["expected_gain"] == pytest.approx(2.0)
    text = as_text(run_check(Options(configs=(repo.configs,), engine="sglang", models=(repo.model,), start=repo.root)))
    assert "most worth tuning first" in text


def test_sizes_that_do_not_divide_are_left_out(repo: Any) -> None:
    found = rows(repo, "NVIDIA_H200", triton="3.8.0", tps=(1, 2, 5), eps=(1, 2))
    assert {(row["tp"], row["ep"]) for row in found} == {(1, 1), (2, 1)}


def test_gains_leave_out_imported_and_interpreted_files(repo: Any) -> None:
    provenance(repo.file(KEY), 50.0, interpreter=True)
    provenance(repo.file(FP8), 50.0, timings={})
    assert read_gains([repo.configs]) == ()
    assert expected((), KEY) == (None, "nothing measured is stored")


def test_a_triton_upgrade_names_what_falls_and_what_is_at_stake(repo: Any) -> None:
    provenance(repo.file(KEY), 50.0)
    repo.write(repo.file(FP8, triton="triton_3_9_0"), json.loads(repo.file(FP8).read_text()))
    result = run_check(Options(configs=(repo.configs,), engine="moegate", triton="3.10.0", start=repo.root))
    fallen = [item for item in result.findings if item.rule == "resolution-changed"]
    assert [item.message for item in fallen] == [
        "E=64 N=896 NVIDIA_H200 (fp8_w8a8, block [128, 128]), up: exact under Triton 3.9.0, older-triton "
        "(triton_3_9_0/E=64,N=896,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json) under 3.10.0; "
        "what that costs was not measured"
    ]
    down = run_check(Options(configs=(repo.configs,), engine="moegate", triton="3.8.0", start=repo.root))
    assert not [item for item in down.findings if item.rule == "resolution-changed"]
    repo.file(FP8, triton="triton_3_9_0").unlink()
    result = run_check(Options(configs=(repo.configs,), engine="moegate", triton="3.9.0", start=repo.root))
    messages = [item.message for item in result.findings if item.rule == "resolution-changed"]
    assert len(messages) == 4
    assert any("its tuning was worth 2.00x (2.00x at batch size 1)" in message for message in messages)


@pytest.mark.parametrize(
    ("change", "rule", "says"),
    [
        ({"covered": 4}, "partial-sweep", "4 of 640 candidates"),
        ({"config_sha256": "0" * 64}, "stale-provenance", "changed after this was written"),
        ({"engine": "moegate", "kernel_hash": "f" * 64}, "stale-provenance", "a hash over all kernels as it was kept"),
        (
            {"engine": "moegate", "kernel_hash": "f" * 64, "kernel_files": {**NOW, "_details/moe_gemm.py": "0"}},
            "stale-provenance",
            "timed on another kernel: _details/moe_gemm.py changed since",
        ),
        (
            {"engine": "moegate", "kernel_hash": "f" * 64, "kernel_files": NOW, "detail": LINEAR},
            "stale-provenance",
            "linear.py new since",
        ),
        (
            {"engine": "moegate", "kernel_hash": "f" * 64, "kernel_files": NOW},
            "stale-provenance",
            f"kernel_hash is ffffffffffff, that of its kernel_files {hash_of(NOW)[:12]}",
        ),
        ({"engine": "moegate", "kernel_files": NOW}, "stale-provenance", "kernel_hash is empty"),
    ],
)
def test_what_a_sidecar_gives_away(change: dict[str, Any], rule: str, says: str, repo: Any) -> None:
    provenance(repo.file(KEY), 50.0, **change)
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    found = [item for item in result.findings if item.rule == rule]
    assert len(found) == 1
    assert says in found[0].message
    assert found[0].file.endswith(".provenance.json")


def test_a_sidecar_contradicts_itself_whatever_is_installed(repo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.check.whole.kernel_files", lambda op: {})
    for kernel_hash, found in (("f" * 64, ["stale-provenance"]), (hash_of(NOW), [])):
        provenance(repo.file(KEY), 50.0, engine="moegate", kernel_hash=kernel_hash, kernel_files=NOW)
        rules = [item.rule for item in run_check(Options(configs=(repo.configs,), start=repo.root)).findings]
        assert [rule for rule in rules if rule == "stale-provenance"] == found


def test_a_sidecar_that_names_thousands_of_files_fills_no_screen(repo: Any) -> None:
    files = {f"{n}.py": "0" for n in range(5000)}
    provenance(repo.file(KEY), 50.0, engine="moegate", kernel_hash="f" * 64, kernel_files=files)
    (found,) = [item for item in run_check(Options(configs=(repo.configs,), start=repo.root)).findings
                if item.rule == "stale-provenance"]  # fmt: skip
    assert len(found.message) < 600


@pytest.mark.parametrize(
    "timed_on",
    [
        {"engine": "moegate", "kernel_hash": hash_of(NOW), "kernel_files": NOW},
        {"engine": "moegate", "kernel_hash": code_hash()},  # before there was one for each; nothing changed since
        {"engine": "moegate"},
        {"engine": "moegate", "kernel_hash": "f" * 64, "detail": {"problem": {"op": "no op of ours"}}},
        {"engine": "moegate", "kernel_hash": hash_of(NOW), "kernel_files": NOW, "detail": {"problem": "damaged"}},
        {"engine": "sglang", "kernel_hash": "f" * 64},
    ],
)
def test_a_kernel_that_is_served_as_it_was_timed(timed_on: dict[str, Any], repo: Any) -> None:
    provenance(repo.file(KEY), 50.0, **timed_on)
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    assert not [item for item in result.findings if item.rule == "stale-provenance"]


@pytest.mark.parametrize(("complete", "count"), [(True, 0), (False, 1)])
def test_a_search_that_came_to_its_end_is_no_partial_sweep(complete: bool, count: int, repo: Any) -> None:
    provenance(repo.file(KEY), 50.0, covered=4, detail={"strategy": "racing", "complete": complete})
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    assert sum(item.rule == "partial-sweep" for item in result.findings) == count


def test_a_pair_tuned_under_two_settings(repo: Any) -> None:
    setting = "TRITON_INTEL_ENABLE_HOST_DESCRIPTOR_SYNTHESIS"
    provenance(repo.file(KEY), 50.0, environment={setting: "1", "torch": "2.13.0"})
    provenance(repo.file(KEY, "down"), 50.0, environment={setting: "0", "torch": "2.14.0"})
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    [item] = [item for item in result.findings if item.rule == "codegen-env-differs"]
    assert setting in item.message
    assert "torch" not in item.message


def test_a_damaged_sidecar_is_a_finding(repo: Any) -> None:
    path = repo.file(KEY)
    path.with_name(sidecar_name(path.name)).write_text('{"origin": "guessed"}')
    result = run_check(Options(configs=(repo.configs,), start=repo.root))
    assert [item.rule for item in result.findings] == ["stale-provenance"]


def test_a_repository_is_covered_from_its_moe_folder(sglang_wheel: Path) -> None:
    model = Path(__file__).resolve().parents[3] / "examples" / "models" / "deepseek-ocr-2"
    devices = ("Intel(R)_Arc(TM)_Pro_B60_Graphics", "NVIDIA_H200")
    options = Options(configs=(sglang_wheel,), engine="sglang", models=(model,), devices=devices, backend="triton")
    found = {row["device"]: row["result"] for row in run_check(options).coverage}
    assert found == {"Intel(R)_Arc(TM)_Pro_B60_Graphics": "exact", "NVIDIA_H200": "default"}
