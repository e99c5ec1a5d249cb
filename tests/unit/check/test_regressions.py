"""A history of regressions: each turns the check red and says why and what to do; fixed, it is green."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegate.configs import ConfigKey
from moegate.dispatch import ROWS, lock
from moegate.families import Layout
from moegate.records.findings import CheckResult
from orchestrator.check.run import Options, run_check

KEY = ConfigKey(64, 896, "NVIDIA_H200")
FP8 = ConfigKey(64, 896, "NVIDIA_H200", "fp8_w8a8", (128, 128))
Repo = Any


def check(repo: Repo, **options: Any) -> CheckResult:
    """What a pull request runs: everything against the branch it starts from."""
    return run_check(Options(
        configs=(repo.configs,), engine="sglang", models=(repo.model.parent,), base="git:main", source=repo.source,
        start=repo.root, **options,
    ))  # fmt: skip


def errors(result: CheckResult, rule: str) -> list[Any]:
    return [item for item in result.findings if item.severity == "error" and item.rule == rule]


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=4))


def deleted(repo: Repo) -> None:
    repo.file(FP8).unlink()


def renamed_device(repo: Repo) -> None:
    repo.file(FP8).rename(repo.file(FP8.on("NVIDIA_H200_141GB_HBM3e")))


def dropped_down(repo: Repo) -> None:
    repo.file(KEY, "down").unlink()


def block_m_of_one(repo: Repo) -> None:
    change_json(repo.file(KEY, "down"), lambda d: d["16"].update(BLOCK_SIZE_M=64))


def block_k_over_group(repo: Repo) -> None:
    change_json(repo.file(FP8), lambda d: d["64"].update(BLOCK_SIZE_K=256))


def removed_key(repo: Repo) -> None:
    change_json(repo.file(FP8), lambda d: d.pop("64"))


def text_for_number(repo: Repo) -> None:
    change_json(repo.file(KEY), lambda d: d["1"].update(num_warps="4"))


def not_a_number(repo: Repo) -> None:
    repo.edit(repo.file(KEY), '"BLOCK_SIZE_N": 64', '"BLOCK_SIZE_N": NaN')


def twice(repo: Repo) -> None:
    repo.edit(repo.file(KEY), '"BLOCK_SIZE_N": 64,', '"BLOCK_SIZE_N": 64,\n        "BLOCK_SIZE_N": 32,')


def misspelt_directory(repo: Repo) -> None:
    (repo.configs / "triton_3_8_0").rename(repo.configs / "triton_380")


def other_version(repo: Repo) -> None:
    (repo.configs / "triton_3_8_0").rename(repo.configs / "triton_3_7_0")


def truncated(repo: Repo) -> None:
    path = repo.file(KEY)
    path.write_text(path.read_text()[:200])


def misspelt_name(repo: Repo) -> None:
    repo.file(KEY).rename(repo.file(KEY).with_name("E=64,N=896,device=NVIDIA_H200.json"))


def no_device(repo: Repo) -> None:
    repo.file(KEY).rename(repo.file(KEY.on("")))


def too_many_stages(repo: Repo) -> None:
    change_json(repo.file(KEY), lambda d: d["256"].update(BLOCK_SIZE_M=256, BLOCK_SIZE_N=256, BLOCK_SIZE_K=128))


def explicit_behind_automatic(repo: Repo) -> None:
    path = repo.source / "sglang/srt/layers/quantization/fp8_utils.py"
    explicit = "    if not backend.is_auto():\n        return _dispatch_explicit_backend(backend)\n"
    automatic = "    if _is_xpu:\n        return _dispatch_auto_backend()\n"
    repo.edit(path, explicit, automatic + explicit)


def platform_before_explicit(repo: Repo) -> None:
    path = repo.source / "sglang/srt/layers/quantization/fp8_utils.py"
    repo.edit(path, "    if not backend", "    if is_xpu():\n        return torch_linear\n    if not backend")


def moved_elif(repo: Repo) -> None:
    path = repo.source / "sglang/srt/layers/quantization/fp8_utils.py"
    repo.edit(path, "if _is_npu:\n        return npu_linear\n    elif _is_xpu:\n        return torch_linear",
              "if _is_xpu:\n        return torch_linear\n    elif _is_npu:\n        return npu_linear")  # fmt: skip


def watched_function_gone(repo: Repo) -> None:
    repo.edit(repo.source / "sglang/srt/layers/quantization/fp8_utils.py", "def _dispatch_auto_backend", "def _choose")


def experts_off_by_one(repo: Repo) -> None:
    change_json(repo.model, lambda d: d.update(n_routed_experts=64))


def fusion_flipped(repo: Repo) -> None:
    repo.edit(repo.table, '"DeepseekV3ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1,',
              '"DeepseekV3ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 0,')  # fmt: skip


def family_field(repo: Repo) -> None:
    repo.edit(repo.table, '_MOE = ("moe_intermediate_size",)', '_MOE = ("intermediate_size",)')


def no_layer_count(repo: Repo) -> None:
    change_json(repo.model, lambda d: d.pop("num_hidden_layers"))


HISTORY = [
    (deleted, "coverage-lost", "exact before, default now"),
    (renamed_device, "coverage-lost", "its content is now .*NVIDIA_H200_141GB_HBM3e"),
    (dropped_down, "coverage-lost", "down: exact before, up-config"),
    (block_m_of_one, "pair-block-m-differ", "batch size 16: down has BLOCK_SIZE_M 64, up has 16"),
    (block_k_over_group, "block-k-exceeds-group", "BLOCK_SIZE_K 256 at batch size 64 exceeds the group of 128"),
    (removed_key, "coverage-lost", "batch size 64 is gone: batch size 16's config serves it now"),
    (text_for_number, "bad-value", "num_warps at batch size 1 is '4'"),
    (not_a_number, "bad-value", "NaN is not a JSON number"),
    (twice, "bad-value", "appears twice"),
    (misspelt_directory, "coverage-lost", "exact before, newer-triton .triton_380"),
    (other_version, "coverage-lost", "exact before, older-triton"),
    (truncated, "bad-value", "not JSON"),
    (misspelt_name, "unparsable-name", "no config file's name"),
    (no_device, "empty-device", "no device reports that"),
    (too_many_stages, "smem-exceeds", "NVIDIA_H200 has 232448"),
    (explicit_behind_automatic, "dispatch-changed", "shadowed"),
    (platform_before_explicit, "dispatch-changed", "shadowed"),
    (moved_elif, "dispatch-changed", "was row 2 and is row 1 now|was row 1 and is row 2 now"),
    (watched_function_gone, "dispatch-changed", "_dispatch_auto_backend is gone"),
    (experts_off_by_one, "family-drift", "experts 63 -> 64"),
    (fusion_flipped, "family-drift", "fused_shared 1 -> 0"),
    (family_field, "family-drift", "intermediate"),
    (no_layer_count, "bad-model-config", "num_hidden_layers: is missing"),
]


def test_the_start_is_green(repo: Repo) -> None:
    result = check(repo)
    assert result.findings == ()
    assert result.files == 4


@pytest.mark.parametrize(("regress", "rule", "says"), HISTORY, ids=[row[0].__name__ for row in HISTORY])
def test_a_regression_is_red(regress: Callable[[Repo], None], rule: str, says: str, repo: Repo) -> None:
    regress(repo)
    result = check(repo)
    assert result.failed
    found = errors(result, rule)
    assert found, result.counts
    assert any(re.search(says, item.message) for item in found), found
    for item in found:
        assert item.fix
        assert item.line >= 1


def test_the_fixed_tree_is_green(repo: Repo) -> None:
    for regress in (dropped_down, removed_key, moved_elif, experts_off_by_one, fusion_flipped):
        regress(repo)
    assert check(repo).failed
    repo.git("checkout", "-q", "--", ".")
    repo.git("clean", "-fdq")
    assert check(repo).findings == ()


def test_blocks_of_one_row_take_wide_chunks_in_our_kernel_alone(repo: Repo) -> None:
    one = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 256, "num_stages": 3}
    change_json(repo.file(FP8), lambda d: d["1"].update(one))
    found = {
        engine: run_check(Options(configs=(repo.configs,), engine=engine, start=repo.root))  # type: ignore[arg-type]
        for engine in ("moegate", "sglang")
    }
    assert not [item for item in found["moegate"].findings if item.severity == "error"]
    assert not errors(found["sglang"], "bad-value")
    assert len(errors(found["sglang"], "block-k-exceeds-group")) == 1


@pytest.mark.parametrize(
    ("engine", "down", "exceeds"),
    [("moegate", False, 1), ("moegate", True, 0), ("sglang", False, 1), ("sglang", True, 1)],
)
def test_of_blocks_of_one_row_only_our_down_kernel_needs_no_shared_memory(
    repo: Repo, engine: Any, down: bool, exceeds: int
) -> None:
    one = {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 16}
    change_json(repo.file(KEY, "down" if down else "up"), lambda d: d["1"].update(one))
    found = run_check(Options(configs=(repo.configs,), engine=engine, start=repo.root))
    assert len(errors(found, "smem-exceeds")) == exceeds


def test_our_own_rows_swapped(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in ROWS if (row.op, row.backend) != ("fused_experts", "triton"))
    table = lock.table(rows)
    monkeypatch.setattr(lock, "table", lambda: table)
    found = errors(check(repo), "dispatch-changed")
    assert any("fused_experts on cuda-sm90" in item.message and "triton" in item.message for item in found)
    assert all("orchestrator dispatch lock" in item.fix for item in found)
    text = (repo.root / "kernels" / "dispatch.lock.json").read_text().splitlines()
    assert all(text[item.line - 1].strip().startswith('"') for item in found)


def test_our_own_family_code_off_by_one(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Layout.shard

    def one_more(layout: Layout, tp: int = 1, ep: int = 1) -> tuple[int, int]:
        intermediate, experts = plain(layout, tp, ep)
        return intermediate, experts + 1

    monkeypatch.setattr(Layout, "shard", one_more)
    found = errors(check(repo), "family-drift")
    assert any("DeepseekOCR2ForCausalLM: E 32 " in item.message and "E 33 " in item.message for item in found)
    text = (repo.root / "kernels" / "dispatch.lock.json").read_text().splitlines()
    assert all("ForC" in text[item.line - 1] or "Grok" in text[item.line - 1] for item in found)


def test_an_accepted_dispatch_change_is_green_and_shown(repo: Repo) -> None:
    path = repo.root / "kernels" / "dispatch.lock.json"
    older = lock.table(tuple(row for row in ROWS if row.backend != "scaled_mm"))
    path.write_text(lock.dumps(older))
    repo.git("commit", "-qam", "an older table")
    lock.write(path)
    result = check(repo)
    assert not result.failed
    shown = [row for row in result.accepted if row["op"] == "block_fp8_linear" and row["request"] == "auto"]
    assert shown
    assert shown[0]["before"] != shown[0]["after"]


def test_a_directory_is_a_base_too(repo: Repo, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(repo.configs, old)
    change_json(repo.file(KEY), lambda d: d["16"].update(BLOCK_SIZE_N=128))
    options = Options(configs=(repo.configs,), engine="sglang", base=str(old), start=repo.root)
    result = run_check(options)
    assert not result.failed
    [item] = [f for f in result.findings if f.rule == "resolution-changed"]
    assert item.message == "batch size 16: BLOCK_SIZE_N 64 -> 128"
    assert '"16"' in repo.file(KEY).read_text().splitlines()[item.line - 1]
    repo.file(FP8).unlink()
    assert errors(run_check(options), "coverage-lost")


def test_a_new_file_is_only_noted(repo: Repo) -> None:
    new = repo.file(KEY, triton="triton_3_9_0")
    repo.write(new, json.loads(repo.file(KEY).read_text().replace("64", "32")))
    result = check(repo)
    assert not result.failed
    notes = [f for f in result.findings if f.severity == "note"]
    assert [n.rule for n in notes] == ["resolution-changed"]
    assert "this file now" in notes[0].message


def test_only_what_is_new_counts_where_a_tree_has_old_defects(repo: Repo) -> None:
    block_m_of_one(repo)
    repo.git("commit", "-qam", "a defect that everybody knows")
    block_k_over_group(repo)
    assert {item.rule for item in check(repo).findings if item.severity == "error"} == {
        "pair-block-m-differ", "block-k-exceeds-group",
    }  # fmt: skip
    new = check(repo, only_new=True)
    assert {item.rule for item in new.findings if item.severity == "error"} == {"block-k-exceeds-group"}


def test_a_whole_folder_that_is_gone(repo: Repo) -> None:
    second = repo.root / "other" / "configs"
    shutil.copytree(repo.configs, second)
    repo.git("add", "-A")
    repo.git("commit", "-qm", "two folders")
    shutil.rmtree(second)
    result = run_check(Options(configs=(repo.root,), engine="sglang", base="git:main", start=repo.root))
    lost = errors(result, "coverage-lost")
    assert len(lost) == 4
    assert all(item.file.startswith("other/configs/triton_3_8_0/") for item in lost)


def test_a_folder_that_moved_is_compared_where_it_is_now(repo: Repo) -> None:
    old, new = repo.root / "other" / "configs", repo.root / "elsewhere" / "deep" / "configs"
    shutil.copytree(repo.configs, old)
    repo.git("add", "-A")
    repo.git("commit", "-qm", "two folders")
    new.parent.mkdir(parents=True)
    old.rename(new)
    options = Options(configs=(repo.root,), engine="sglang", base="git:main", start=repo.root)
    assert not errors(run_check(options), "coverage-lost")
    next(new.rglob("*fp8*.json")).unlink()
    [lost] = errors(run_check(options), "coverage-lost")
    assert lost.file.startswith("elsewhere/deep/configs/")
