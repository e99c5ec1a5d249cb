"""The three commands as people and CI call them: exit codes, one JSON document, files for other tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moegate.configs import ConfigKey
from moegate.dispatch import OPS
from moegate.errors import UsageError
from moegate.records import Measurement, read
from orchestrator.cli import app

PROJECT = Path(__file__).resolve().parents[3]
KEY = ConfigKey(64, 896, "NVIDIA_H200")


def orchestrator(*arguments: object, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "kernels")])
    return subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", *map(str, arguments)],
        cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def document(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def break_pair(repo: Any) -> None:
    path = repo.file(KEY, "down")
    path.write_text(path.read_text().replace('"BLOCK_SIZE_M": 16', '"BLOCK_SIZE_M": 64', 1))


def test_what_we_ship_has_no_finding() -> None:
    for engine in ("moegate", "sglang"):
        done = orchestrator("check", "--engine", engine, "--json")
        assert done.returncode == 0, done.stderr
        found = document(done)
        assert found["findings"] == []
        assert found["counts"] == {}
        assert found["files"] >= 2


def test_check_as_text_json_sarif_annotations_and_measurement(repo: Any, tmp_path: Path) -> None:
    break_pair(repo)
    sarif, out = tmp_path / "check.sarif", tmp_path / "result.json"
    done = orchestrator("check", "--configs", repo.configs, "--sarif", sarif, "--out", out, "--github", cwd=repo.root)
    assert done.returncode == 1
    name = "kernels/configs/triton_3_8_0/E=64,N=896,device_name=NVIDIA_H200_down.json"
    assert f"  {name}:3: batch size 1: down has BLOCK_SIZE_M 64" in done.stdout
    assert "error: pair-block-m-differ (1)" in done.stdout
    assert f"::error file={name.replace(',', '%2C')},line=3,title=pair-block-m-differ::" in done.stderr
    assert "Traceback" not in done.stderr
    [result] = json.loads(sarif.read_text())["runs"][0]["results"]
    assert result["ruleId"] == "pair-block-m-differ"
    region = result["locations"][0]["physicalLocation"]["region"]
    assert region["startLine"] == 3
    measured = read(Measurement, out)
    assert (measured.kind, measured.status, measured.work["files"]) == ("check", "failed", 4)
    assert measured.work["rules"] >= 20
    assert [case.status for case in measured.cases] == ["failed"]
    found = document(orchestrator("check", "--configs", repo.configs, "--json", cwd=repo.root))
    assert {"findings", "counts", "files"} <= set(found)
    assert set(found["findings"][0]) == {"rule", "severity", "file", "line", "message", "fix"}
    assert found["findings"][0]["file"] == name


def test_two_fixes_of_one_rule_are_set_apart_from_what_is_wrong(repo: Any) -> None:
    lines = repo.file(KEY).read_text()
    repo.file(KEY).write_text(lines.replace('"BLOCK_SIZE_N": ', '"BLOCK_SIZE_N": -', 1).replace("{", '{"a": {}, ', 1))
    said = orchestrator("check", "--configs", repo.configs, cwd=repo.root).stdout
    assert "error: bad-value (2)" in said
    shown = [line for line in said.splitlines() if line.startswith("  ") and "NVIDIA_H200.json:" in line]
    assert shown
    assert all(" (fix: " in line and line.endswith(")") for line in shown)


STORE = "store_kv_cache,heads=8,dim=64,device_name=cpu,dtype=float32.json"
GOOD = '{"1": {"num_split": 1}, "64": {"num_split": 4}}'


def dense(tmp_path: Path, name: str, text: str) -> Path:
    """A folder as the tuner leaves it, with one file of an op that no engine looks up."""
    (tmp_path / "dense").mkdir(exist_ok=True)
    (tmp_path / "dense" / name).write_text(text)
    return tmp_path


def test_a_name_that_leaves_no_room_for_a_sidecars_is_checked_like_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    name = f"E=8,N=128,device_name={'x' * 222}.json"
    assert len(name) < 256 < len(name) + len(".provenance")
    (folder / name).write_text("{}")
    done = orchestrator("check", "--configs", tmp_path)
    assert done.stdout.startswith(("error", "warning")), done.stdout + done.stderr
    assert "1 config file:" in done.stdout


def test_files_of_unknown_ops_are_said_not_to_be_checked(tmp_path: Path) -> None:
    root = dense(tmp_path, "other_op,heads=8,device_name=cpu,dtype=float32.json", "{}")
    for folder in (root, root / "dense"):
        done = orchestrator("check", "--configs", folder)
        assert done.returncode == 0, done.stdout
        assert done.stdout == "0 config files: no finding; not checked: 1 of other_op\n"
    assert document(orchestrator("check", "--configs", root, "--json"))["unchecked"] == {"other_op": 1}


def test_a_file_of_the_store_is_checked(tmp_path: Path) -> None:
    from tuner.lookup import lookup
    from tuner.problem import parse_shape

    root = dense(tmp_path, STORE, GOOD.replace("64", "2000000"))
    found = lookup(parse_shape("heads=8,dim=64", "store_kv_cache", "float32"), root, "cpu", "3.8.0", lambda _: None)
    assert found.at(1 << 22).configs == {"main": {"num_split": 4}}
    for words in (("--configs", root), ("--configs", root / "dense"), (root / "dense" / STORE,)):
        done = orchestrator("check", *words)
        assert (done.returncode, done.stdout) == (0, "1 config file: no finding\n")


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ('{\n"1": {"num_split": 0}}', "bad-value", 2), ('{"1": {"num_split": 65536}}', "bad-value", 1),
        ('{"1": {"num_split": "1"}}', "bad-value", 1), ('{"1": 1}', "bad-value", 1), ("{}", "bad-value", 1),
        ("[]", "bad-value", 1), ("{", "bad-value", 1), ('{"x": 1, "1": {"num_split": 1}}', "bad-value", 1),
        ('{"01": {"num_split": 1}, "2": {"num_split": 1}}', "bad-value", 1),
        ('{"1": {}}', "missing-field", 1), ('{\n\n"1": {"num_split": 1, "a": 2}}', "unknown-field", 3),
    ],
)  # fmt: skip
def test_what_the_stores_lookup_would_refuse_is_an_error(tmp_path: Path, text: str, rule: str, line: int) -> None:
    from moegate.errors import UsageError
    from tuner.lookup import lookup
    from tuner.problem import parse_shape

    root = dense(tmp_path, STORE, text)
    done = orchestrator("check", "--configs", root, "--json")
    (found,) = document(done)["findings"]
    assert (done.returncode, found["rule"], found["severity"], found["line"]) == (1, rule, "error", line)
    assert found["file"].endswith(STORE)
    assert "default" not in found["message"]
    with pytest.raises(UsageError):
        lookup(parse_shape("heads=8,dim=64", "store_kv_cache", "float32"), root, "cpu", "3.8.0", lambda _: None)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("store_kv_cache,heads=8,device_name=cpu,dtype=float32.json", "unparsable-name"),
        ("store_kv_cache,heads=8,dim=64.json", "unparsable-name"),
        ("store_kv_cache,dim=64,heads=8.json", "unparsable-name"),
        ("store_kv_cacheheads=8,dim=64,device_name=cpu,dtype=float32.json", "unparsable-name"),
        ("store_kv_cache_heads=8,dim=64,device_name=cpu,dtype=float32.json", "unparsable-name"),
        ("store_kv_cache,heads=8,dim=64,device_name=NVIDIA_H2000,dtype=float32.json", "unreachable"),
        ("store_kv_cache,heads=8,dim=64,device_name=NVIDIA H200,dtype=float32.json", "unreachable"),
        ("store_kv_cache,heads=8,dim=64,device_name=cpu\n,dtype=float32.json", "unreachable"),
        ("store_kv_cache,heads=8,dim=64,device_name=cpu,dtype=fp8_w8a8.json", "unreachable"),
        ("store_kv_cache,heads=8,dim=64,device_name=,dtype=float32.json", "empty-device"),
    ],
)
def test_names_that_the_store_is_never_asked_for(tmp_path: Path, name: str, rule: str) -> None:
    root = dense(tmp_path, name, GOOD)
    for folder in (root, root / "dense"):
        found = document(orchestrator("check", "--configs", folder, "--json"))["findings"]
        assert [one["rule"] for one in found] == [rule]


def test_a_dense_ops_files_are_checked_beside_those_of_the_experts(repo: Any) -> None:
    dense(repo.configs.parent, "N=4096,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json", "{")
    for configs in (repo.configs.parent, repo.configs.parent / "dense"):
        found = document(orchestrator("check", "--configs", configs, "--json"))
        assert found["counts"] == {"bad-value": 1}
        assert found["files"] == (5 if configs == repo.configs.parent else 1)


def test_links_that_lead_in_a_circle_end_no_check(repo: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    dense(root, STORE, GOOD)
    names = (STORE.replace("64", "65"), STORE.replace("64", "66").replace(".json", ".provenance.json"), "triton_3_8_0")
    folders = (root, root / "dense", repo.configs, repo.configs / "triton_3_8_0")
    for link in (folder / name for folder in folders for name in names if not (folder / name).exists()):
        link.symlink_to(link.name)
    for configs, files in ((root, 1), (root / "dense", 1), (repo.configs, 4)):
        done = orchestrator("check", "--configs", configs, "--json")
        assert (done.returncode, document(done)["files"]) == (0, files)


@pytest.mark.parametrize("engine", ["moegate", "sglang"])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device"])
def test_what_is_no_file_is_reported_and_not_waited_for(repo: Any, tmp_path: Path, kind: str, engine: str) -> None:
    dense(repo.configs, STORE, GOOD)
    os.mkfifo(tmp_path / "pipe")
    target = Path("/dev/zero") if kind == "link to a device" else tmp_path / "pipe"
    places = [repo.file(KEY), repo.file(KEY.on("NVIDIA_H100_80GB_HBM3")), repo.configs / "dense" / STORE]
    for place in places:
        place.unlink(missing_ok=True)
        os.mkfifo(place) if kind == "pipe" else place.symlink_to(target)
    words = ("--engine", engine, "--models", repo.model, "--base", "git:HEAD")
    done = orchestrator("check", "--configs", repo.configs, *words, "--json", cwd=repo.root)
    findings = document(done)["findings"]
    assert done.returncode == 1
    found = {repo.root / one["file"] for one in findings if one["message"] == "is not a regular file"}
    assert found == set(places)
    assert any("opens it all the same" in one["message"] for one in findings) == (engine == "sglang")


def test_a_device_name_with_a_space_is_asked_for_by_no_lookup(repo: Any) -> None:
    path = repo.file(KEY.on("NVIDIA_B200"))
    path.rename(path.with_name(path.name.replace("NVIDIA_B200", "NVIDIA B200")))
    done = orchestrator("check", "--configs", repo.configs, "--json")
    assert document(done)["counts"] == {"unreachable": 1}


def test_a_store_file_is_held_against_its_sidecar_and_its_base(tmp_path: Path) -> None:
    from moegate.records import Provenance, write

    base, root = tmp_path / "base", tmp_path / "head"
    for folder, text in ((base, GOOD), (root, GOOD.replace("4}", "0}"))):
        folder.mkdir()
        dense(folder, STORE, text)
    sidecar = root / "dense" / STORE.replace(".json", ".provenance.json")
    write(sidecar, Provenance(origin="measured", engine="moegate", date="", config_sha256="0" * 64))
    words = ("check", "--configs", root, "--base", base, "--only-new", "--json")
    assert [one["rule"] for one in document(orchestrator(*words))["findings"]] == ["bad-value", "stale-provenance"]
    (base / "dense" / STORE).write_text((root / "dense" / STORE).read_text())
    (found,) = document(orchestrator(*words))["findings"]
    assert (found["rule"], found["message"]) == ("stale-provenance", "the config changed after this was written")


def test_changed_files_as_pre_commit_passes_them(repo: Any) -> None:
    assert orchestrator("check", repo.file(KEY), cwd=repo.root).returncode == 0
    break_pair(repo)
    assert orchestrator("check", repo.file(KEY), cwd=repo.root).returncode == 1
    assert orchestrator("check", repo.file(KEY.on("NVIDIA_B200")), cwd=repo.root).returncode == 0


def test_a_named_file_that_nothing_looks_at_is_refused(repo: Any, tmp_path: Path) -> None:
    """Else the verdict on it would be that of other files."""
    config, readme = repo.file(KEY), repo.root / "README.md"
    sidecar = config.with_name(config.name.replace(".json", ".provenance.json"))
    for path in (readme, sidecar, tmp_path / "other" / config.name):
        repo.write(path, "{}")
    for words in ((readme,), (config, readme), (repo.model,), ("--configs", tmp_path / "other", config)):
        done = orchestrator("check", *words, "--json", cwd=repo.root)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{words[-1]}: is no tuned config" in done.stderr
    done = orchestrator("check", sidecar, "--json", cwd=repo.root)
    assert document(done)["counts"] == {"stale-provenance": 1}  # as pre-commit passes them: a sidecar is checked too
    done = orchestrator("check", config, "--json", cwd=repo.root)  # and with its config; files are both projections
    assert (document(done)["counts"], document(done)["files"]) == ({"stale-provenance": 1}, 2)


def test_several_models_and_devices_in_a_row(repo: Any) -> None:
    done = orchestrator(
        "check", "--configs", repo.configs, "--models", repo.model, repo.model.parent, "--devices", "NVIDIA_H200",
        "NVIDIA_B200", "--json", cwd=repo.root,
    )  # fmt: skip
    assert len(document(done)["coverage"]) == 4
    assert orchestrator("check", "nothing.json", cwd=repo.root).returncode == 2


def test_check_against_a_branch(repo: Any) -> None:
    repo.file(KEY).unlink()
    done = orchestrator("check", "--configs", "kernels/configs", "--base", "git:main", "--json", cwd=repo.root)
    assert done.returncode == 1
    assert document(done)["counts"]["coverage-lost"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--configs", "/nonexistent"), ("check", "--engine", "x"), ("check", "--triton", "x"),
        ("check", "--base", "git:nonexistent"), ("check", "--base", "/nonexistent"), ("check", "--tp", "0"),
        ("check", "--tp", "9" * 5000),
        ("check", "--tp", "a"), ("check", "--source", "/nonexistent"), ("check", "--targets", "sm_70"),
        ("check", "--base", "", "--only-new"), ("check", "--targets", "cpu"),
        ("check", "--nope"), ("dispatch", "show", "--op", "topk", "--platform", "sm_70"),
        ("explain",), ("explain", "--model", "/nonexistent", "--device", "x", "--triton", "3.8.0"),
        ("dispatch", "show", "--op", "x", "--platform", "cpu"),
        ("dispatch", "show", "--op", "fused_experts", "--platform", "cpu", "--request", "deep_gemm"),
        ("dispatch", "lock", "--check", "--file", "/nonexistent"), ("dispatch", "diff", "--base", "git:nonexistent"),
        ("dispatch", "extract", "--source", "/nonexistent"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_exit_2_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = orchestrator(*arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() or done.stdout.strip()


@pytest.mark.parametrize(
    "words",
    [
        *((option, "") for option in ("--base", "--targets", "--configs", "--models", "--devices", "--dtype",
                                      "--backend", "--source", "--sarif", "--out")),
        ("--base", " ", "--only-new"), ("--targets", ","), ("--devices=cpu", "--devices="),
    ],
)  # fmt: skip
def test_an_empty_word_is_no_default(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["check", *words])
    if isinstance(done.exception, UsageError):
        assert done.exception.field == words[0].partition("=")[0]
        assert done.exception.fix == "name something, or leave the option out"
    else:
        assert done.exit_code == 2
    assert "is empty" in f"{done.exception}{done.output}"


def test_dispatch_show_says_the_chain() -> None:
    found = document(orchestrator("dispatch", "show", "--op", "fused_experts", "--platform", "sm_90", "--json"))
    assert (found["op"], found["platform"], found["requested"]) == ("fused_experts", "cuda-sm90", "auto")
    assert found["resolved"] == "triton"
    assert found["chain"][-1] == {"backend": "triton", "chosen": True, "why": found["chain"][-1]["why"]}


@pytest.mark.parametrize(
    ("name", "platform"),
    [("NVIDIA_H200", "cuda-sm90"), ("NVIDIA H200", "cuda-sm90"), ("Intel(R) Graphics [0xe211]", "xpu-bmg"),
     ("cpu", "cpu")],
)  # fmt: skip
def test_dispatch_show_takes_a_device(name: str, platform: str) -> None:
    done = CliRunner().invoke(app, ["dispatch", "show", "--op", "fused_experts", "--platform", name, "--json"])
    assert json.loads(done.stdout)["platform"] == platform


@pytest.mark.parametrize(
    ("name", "words"),
    [("NVIDIA H201", "NVIDIA_H201 is not in the device table .near: .*NVIDIA_H200"), ("sm_70", "unknown platform")],
)
def test_dispatch_show_guesses_no_platform(name: str, words: str) -> None:
    done = CliRunner().invoke(app, ["dispatch", "show", "--op", "fused_experts", "--platform", name])
    assert isinstance(done.exception, UsageError)
    assert re.search(words, str(done.exception))
    assert done.exception.fix is not None
    assert "cuda-sm90" in done.exception.fix


def test_dispatch_show_can_be_told_how_many_experts_there_are() -> None:
    """What is passed by because nobody told can be told."""
    ask = ["dispatch", "show", "--op", "grouped_topk", "--platform", "bmg", "--package", "sgl_kernel", "--json"]
    found = [json.loads(CliRunner().invoke(app, [*ask, *more]).stdout)["resolved"]
             for more in ([], ["--experts=256", "--groups=8"], ["--experts=160", "--groups=8"])]  # fmt: skip
    assert found == ["triton", "intel_xpu", "triton"]


def test_dispatch_show_asks_each_op_what_it_is_for() -> None:
    """An op of quantised weights alone is not asked about others."""
    for op in OPS:
        done = CliRunner().invoke(app, ["dispatch", "show", "--op", op, "--platform", "sm_90", "--json"])
        assert (done.exit_code, json.loads(done.stdout)["resolved"] is None) == (0, False), op


@pytest.mark.parametrize(
    ("words", "without", "found"),
    [
        ("--op fused_experts --platform gfx942 --package aiter --env SGLANG_USE_AITER=1 --quant fp8_w8a8 --per-channel",
         "--per-channel", ("aiter", "triton")),
        ("--op fused_experts --platform sm_90 --activation gelu", "--activation gelu", (None, "triton")),
    ],
)  # fmt: skip
def test_dispatch_show_can_be_told_what_rows_ask_of_a_problem(
    words: str, without: str, found: tuple[str | None, str]
) -> None:
    both = (CliRunner().invoke(app, ["dispatch", "show", "--json", *line.split()])
            for line in (words, words.replace(without, "")))  # fmt: skip
    assert tuple(json.loads(done.stdout)["resolved"] for done in both) == found


def test_dispatch_show_can_be_told_that_scales_are_powers_of_two() -> None:
    """What is refused for want of them can be asked for."""
    ask = ("dispatch", "show", "--op", "block_fp8_linear", "--platform", "sm_100", "--quant", "fp8_w8a8", "--block",
           "32,32", "--package", "deep_gemm", "--request", "deep_gemm")  # fmt: skip
    assert "ue8m0" in orchestrator(*ask).stdout
    assert orchestrator(*ask).returncode == 2
    assert document(orchestrator(*ask, "--ue8m0", "--json"))["resolved"] == "deep_gemm"


def test_dispatch_lock_and_diff(tmp_path: Path) -> None:
    assert orchestrator("dispatch", "lock", "--check").returncode == 0
    path = tmp_path / "lock.json"
    assert orchestrator("dispatch", "lock", "--file", path).returncode == 0
    path.write_text(path.read_text().replace('"triton: chosen"', '"torch: chosen"', 1))
    done = orchestrator("dispatch", "lock", "--check", "--file", path)
    assert done.returncode == 1
    assert "torch -> triton" in done.stdout
    assert "before: " in done.stdout
    changes = document(orchestrator("dispatch", "diff", "--base", path, "--json"))["changes"]
    assert len(changes) == 1
    assert changes[0]["before"][-1] == "torch: chosen"


def test_dispatch_extract_is_red_on_the_shadowing_line(repo: Any) -> None:
    assert orchestrator("dispatch", "extract", "--source", repo.source, "--base", "git:main").returncode == 0
    path = repo.source / "sglang/srt/layers/quantization/fp8_utils.py"
    repo.edit(path, "    if not backend", "    if _is_xpu:\n        return torch_linear\n    if not backend")
    for base in ((), ("--base", "git:main")):
        done = orchestrator("dispatch", "extract", "--source", "engine", *base, "--json", cwd=repo.root)
        assert done.returncode == 1
        found = document(done)
        line = found["findings"][0]["line"]
        assert path.read_text().splitlines()[line - 1].strip() == "return torch_linear"
        assert found["findings"][0]["file"] == "engine/sglang/srt/layers/quantization/fp8_utils.py"


def test_hostile_file_names_reach_no_terminal(repo: Any) -> None:
    folder = os.fsencode(repo.configs / "triton_3_8_0")
    for name in (b"E=1\x1b[31m,N=1.json", b"E=2,N=2\n::error::x.json", b"E=3,\xff\xfe.json"):
        with open(folder + b"/" + name, "wb") as stream:  # noqa: PTH123 - bytes that are no text
            stream.write(b"{}")
    done = orchestrator("check", "--configs", repo.configs, "--github", cwd=repo.root)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "\n::error::x" not in done.stdout + done.stderr
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr
    assert (
        document(orchestrator("check", "--configs", repo.configs, "--json", cwd=repo.root))["counts"]["unparsable-name"]
        == 3
    )


def test_the_commands_load_nothing_heavy() -> None:
    code = (
        "import sys, orchestrator.commands.check, orchestrator.commands.explain, orchestrator.commands.dispatch\n"
        "import orchestrator.check.run, orchestrator.check.explain, orchestrator.check.dispatching\n"
        "print(sorted({'torch', 'triton', 'ray', 'scipy', 'numpy', 'docker', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_commit_whose_links_lead_out_is_refused(repo: Any) -> None:
    (repo.configs / "triton_3_8_0" / "out").symlink_to("/etc")
    repo.git("add", "-A")
    repo.git("commit", "-q", "-m", "links")
    argv = [sys.executable, "-P", "-m", "orchestrator", "check", "--configs", str(repo.configs), "--base", "git:HEAD"]
    done = subprocess.run(argv, cwd=repo.root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be unpacked" in done.stderr
    assert "Traceback" not in done.stderr
