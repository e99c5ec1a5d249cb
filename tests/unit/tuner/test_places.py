"""What a command writes and where: what is in the way is told before it works, and nothing is half written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.errors import UsageError
from moegate.journal import Journal
from moegate.records import Provenance, write
from moegate.records.provenance import sidecar_name
from tuner.commands.compile import run as compile_configs
from tuner.commands.emit import run as rewrite
from tuner.commands.replay import run as replay
from tuner.config import Config
from tuner.emit import Origin, emit_all, ensure_places, files_of
from tuner.finals import Final
from tuner.journaled import PURPOSE
from tuner.places import ensure_apart, ensure_place, ensure_workplace
from tuner.problem import Problem

TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
EXPERTS = Problem("fused_experts", 8, 64, 128, 2, "float32")
BLOCKS = Problem("fused_experts", 8, 128, 128, 2, "fp8_w8a8", (128, 128))
LINEAR = Problem("block_fp8_linear", 1, 256, 256, 1, "fp8_w8a8", (128, 128))
STORE = Problem("store_kv_cache", 1, 4, 64, 1, "float32")
PROBLEMS = [(EXPERTS, True), (EXPERTS, False), (BLOCKS, True), (LINEAR, False), (STORE, False)]
DEVICE, TRITON = "NVIDIA_H200", "3.8.0"


def _places() -> list[tuple[Problem, bool, int]]:
    return [(p, vllm, n) for p, vllm in PROBLEMS for n in range(len(files_of(Path(), p, TRITON, DEVICE, vllm=vllm)))]


@pytest.mark.parametrize(("problem", "vllm"), PROBLEMS)
def test_the_files_that_are_foretold_are_those_that_are_written(tmp_path: Path, problem: Problem, vllm: bool) -> None:
    origin = Origin("moegate", "hash", DEVICE, "GPU-1", TRITON, {}, 8, 4, False, "tuner tune")
    config = Config.of({"num_split": 1} if problem is STORE else TILE)
    finals = [Final(1, dict.fromkeys(problem.projections, config), 5.0, 9.0, verified=True)]
    written = emit_all(tmp_path, problem, finals, origin, vllm=vllm)
    assert set(written) == set(files_of(tmp_path, problem, TRITON, DEVICE, vllm=vllm))
    ensure_places(tmp_path, problem, vllm=vllm)  # what is there already is written again
    ensure_places(tmp_path, problem, triton=TRITON, device_name=DEVICE, vllm=vllm)


@pytest.mark.parametrize(("problem", "vllm", "number"), _places())
@pytest.mark.parametrize("known", [True, False])
def test_a_folder_under_the_name_of_any_of_them_is_refused(
    tmp_path: Path, problem: Problem, vllm: bool, number: int, known: bool
) -> None:
    path = files_of(tmp_path, problem, TRITON, DEVICE, vllm=vllm)[number]
    path.mkdir(parents=True)
    told = {"triton": TRITON, "device_name": DEVICE} if known else {}
    with pytest.raises(UsageError, match="is a folder, not the name of a file") as error:
        ensure_places(tmp_path, problem, vllm=vllm, **told)
    assert (error.value.file, error.value.field) == (str(path), "--out")
    assert error.value.fix == "move what is there away, or name another place"


def test_what_has_another_name_is_in_nobodys_way(tmp_path: Path) -> None:
    other = Problem("fused_experts", 8, 64, 128, 2, "fp8_w8a8")
    for problem in (other, Problem("fused_experts", 4, 64, 128, 2, "float32")):
        for path in files_of(tmp_path, problem, TRITON, DEVICE, vllm=True):
            path.mkdir(parents=True)
    for problem in (Problem("fused_experts", 8, 64, 128, 2, "bfloat16"), EXPERTS):
        ensure_places(tmp_path, problem, triton=TRITON, device_name=DEVICE, vllm=True)


@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        ("journal", "folder", "is a folder"),
        ("journal", "pipe", "is no regular file"),
        ("children", "file", "is no folder"),
        ("children/measure.log", "folder", "is a folder"),
        ("cache", "file", "is no folder"),
    ],
)
def test_a_folder_in_which_no_tuning_can_work(tmp_path: Path, made: str, kind: str, words: str) -> None:
    ensure_workplace(tmp_path)
    path = tmp_path / made
    path.parent.mkdir(exist_ok=True)
    make: dict[str, Callable[[Path], None]] = {"folder": Path.mkdir, "file": Path.touch, "pipe": os.mkfifo}
    make[kind](path)
    with pytest.raises(UsageError, match=words) as error:
        ensure_workplace(tmp_path)
    assert (error.value.file, error.value.field) == (str(path), "--out")
    assert error.value.fix


def test_a_folder_that_parts_a_search_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be searched by children") as error:
        ensure_workplace(tmp_path / "a:b")
    assert error.value.field == "--out"


def test_a_name_that_nothing_can_have_is_told_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long") as error:
        ensure_place(tmp_path / ("x" * 300), "--result")
    assert error.value.field == "--result"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("out", "where the folder of --out goes"),
        (".", "where the folder of --out goes"),
        ("out/journal", "among the files of the tuning itself"),
        ("out/configs/triton_3_8_0/result.json", "among the files"),
        ("out/dense/x.json", "among the files"),
        ("out/../out/vllm/x.json", "among the files"),
        ("out/result.json", None),
        ("out/more/journal", None),
        ("result.json", None),
    ],
)
def test_a_record_is_not_put_in_the_way_of_the_tuning(tmp_path: Path, result: str, words: str | None) -> None:
    if words is None:
        ensure_apart(tmp_path / result, tmp_path / "out")
        return
    with pytest.raises(UsageError, match=words) as error:
        ensure_apart(tmp_path / result, tmp_path / "out")
    assert (error.value.field, error.value.fix) == ("--result", str(tmp_path / "out/result.json"))


def _config(root: Path, name: str, directory: str = "") -> Path:
    path = root / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"1": TILE}))
    return path


def test_emit_writes_all_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    _config(source, "E=4,N=64,device_name=NVIDIA_H200.json")
    last = _config(source, "E=8,N=64,device_name=NVIDIA_H200.json")
    in_the_way = out / sidecar_name(last.name)
    in_the_way.mkdir(parents=True)
    with pytest.raises(UsageError, match="is a folder") as error:
        rewrite(target="vllm", source=source, out=out, as_json=False)
    assert (error.value.file, error.value.field) == (str(in_the_way), "--out")
    in_the_way.rmdir()
    (source / sidecar_name(last.name)).write_text("")
    with pytest.raises(UsageError, match="provenance"):
        rewrite(target="vllm", source=source, out=out, as_json=False)
    assert list(out.iterdir()) == []
    (source / sidecar_name(last.name)).unlink()
    _config(source, "E=8,N=64,device_name=NVIDIA_H200,backend=flydsl.json")
    assert rewrite(target="vllm", source=source, out=out, as_json=False) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "E=4,N=64,device_name=NVIDIA_H200.json", last.name
    ]  # fmt: skip
    assert "backend=flydsl.json: skipped, it is for the kernel of flydsl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("triton_3_6_0/E=8,N=64,device_name=NVIDIA_H200.json", "triton_3_8_0/E=8,N=64,device_name=NVIDIA_H200.json"),
        (
            "triton_3_8_0/E=8,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json",
            "triton_3_8_0/E=8,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
        ),
    ],
)
def test_two_files_do_not_become_one(tmp_path: Path, first: str, second: str) -> None:
    for name in (first, second):
        _config(tmp_path / "source/configs", name)
    with pytest.raises(UsageError, match="would both become") as error:
        rewrite(target="vllm", source=tmp_path / "source", out=tmp_path / "out", as_json=False)
    assert first in str(error.value)
    assert second in str(error.value)
    assert not (tmp_path / "out").exists()
    assert rewrite(target="sglang", source=tmp_path / "source", out=tmp_path / "out", as_json=False) == 0


SMALL = {"fields": ["M", "BLOCK_SIZE_M", "us", "error"], "E": 4, "N": 16, "H": 16, "topk": 2, "device": "NVIDIA H200"}


def _recording(path: Path, slowest: float) -> Path:
    rows = [[1, 16, 5.0, None], [1, 32, slowest, None]]
    path.write_text(json.dumps({"meta": SMALL, "records": rows}))
    return path


def _replayed(journal: Path, out: Path, capsys: pytest.CaptureFixture[str], **more: float) -> dict[str, float]:
    words = {"strategy": "exhaustive", "effort": "exhaustive", "no_prior": False, "without": "", "seed": 0,
             "delay_ms": 0.0, "noise": 0, **more}  # fmt: skip
    assert replay(journal=journal, out=out, as_json=True, **words) == 0  # type: ignore[arg-type]
    document: dict[str, float] = json.loads(capsys.readouterr().out)
    return document


def test_answers_of_another_recording_are_not_this_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = _recording(tmp_path / "a.json", 9.0), _recording(tmp_path / "b.json", 4.0)
    assert _replayed(first, tmp_path / "out", capsys)["measured"] > 0
    assert _replayed(first, tmp_path / "out", capsys)["measured"] == 0
    again = _replayed(second, tmp_path / "out", capsys)
    assert again["measured"] > 0
    assert (again["mean_regret"], json.loads((tmp_path / "out/up.json").read_text())["1"]["BLOCK_SIZE_M"]) == (0.0, 32)


def test_a_replay_leaves_a_tuning_and_the_recording_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = _recording(tmp_path / "journal", 9.0)
    before = recording.read_bytes()
    with pytest.raises(UsageError, match="holds the recording that is replayed"):
        _replayed(recording, tmp_path, capsys)
    assert recording.read_bytes() == before
    with Journal.open(tmp_path / "tuned/journal", purpose=PURPOSE) as journal:
        journal.append("environment", env="x")
    before = (tmp_path / "tuned/journal").read_bytes()
    with pytest.raises(UsageError, match="is the journal of a tuning on a device"):
        _replayed(recording, tmp_path / "tuned", capsys)
    assert (tmp_path / "tuned/journal").read_bytes() == before
    (tmp_path / "out/up.json").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"up\.json: --out: is a folder"):
        _replayed(recording, tmp_path / "out", capsys)
    assert not (tmp_path / "out/journal").exists()


@pytest.mark.parametrize("more", [{"delay_ms": float("inf")}, {"delay_ms": float("nan")}, {"noise": 10**9}])
def test_replays_that_would_never_end_are_refused(
    tmp_path: Path, more: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(more)).replace('_', '-')}: must be"):
        _replayed(_recording(tmp_path / "a.json", 9.0), tmp_path / "out", capsys, **more)


def test_compile_names_what_does_not_fit_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json"
    path.write_text(json.dumps({"1": TILE, "64": {**TILE, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "num_stages": 8}}))
    code = compile_configs(targets="sm_90", configs=tmp_path, out=tmp_path / "facts.json")
    assert (code, json.loads((tmp_path / "facts.json").read_text())["counts"]) == (1, {"ok": 1, "over-shared": 1})
    told = capsys.readouterr()
    head, said = told.out.splitlines()
    assert head == "entries of config files for sm_90: 1 ok, 1 over-shared"
    assert "over-shared" not in told.err  # the answer, once: progress is on the other stream
    assert said.startswith(f"  {path}, M=64 for sm_90: ")
    assert said.endswith(" bytes of shared memory are more than the target has")


@pytest.mark.parametrize("name", ["README.md", "E=8.json", "E=8,N=64,device_name=NVIDIA_H200.provenance.json"])
def test_compile_refuses_a_named_file_that_is_no_config(tmp_path: Path, name: str) -> None:
    good, other = tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json", tmp_path / name
    good.write_text(json.dumps({"1": {**TILE, "num_warps": 3}}))
    other.write_text("{}")
    (tmp_path / "files.json").write_text(json.dumps([str(good), str(other)]))
    for option, value in (("configs", other), ("files", tmp_path / "files.json")):
        with pytest.raises(UsageError, match="is no config file") as error:
            compile_configs(targets="sm_90", **{option: value})
        assert (error.value.file, error.value.field) == (str(other), f"--{option}")
    out = tmp_path / "facts" / "facts.json"
    out.parent.mkdir()
    assert compile_configs(targets="sm_90", configs=tmp_path, out=out) == 1  # a folder may hold other files
    assert json.loads(out.read_text())["counts"]["failed"] == 1


def test_compile_refuses_to_compile_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chooses among kernels") as error:
        compile_configs(targets="sm_90", configs=tmp_path, variants="basic")
    assert error.value.field == "--variants"
    with pytest.raises(UsageError, match="holds no config file of routed experts"):
        compile_configs(targets="sm_90", configs=tmp_path)
    with pytest.raises(UsageError, match="does not exist") as error:
        compile_configs(targets="sm_90", configs=tmp_path / "nowhere")
    assert error.value.field == "--configs"
    with pytest.raises(UsageError, match="no variant has '' in its name"):
        compile_configs(targets="sm_90", variants="")
    (tmp_path / "files.json").write_text("[]")
    with pytest.raises(UsageError, match="either --configs or --files"):
        compile_configs(targets="sm_90", configs=tmp_path, files=tmp_path / "files.json")


def test_provenance_goes_along(tmp_path: Path) -> None:
    path = _config(tmp_path / "source", "E=8,N=64,device_name=NVIDIA_H200.json")
    path.write_text(json.dumps({"1": {**TILE, "USE_TMA": True}}))
    record = Provenance(
        origin="measured", engine="moegate", date="2026-11-29T00:00:00+00:00", kernel_hash="a" * 64, device=DEVICE,
        identity="GPU-1", triton=TRITON, environment={}, candidates=4, covered=2, timings={}, verified=True,
        interpreter=False, command="tuner tune", config_sha256="b" * 64, detail={},
    )  # fmt: skip
    write(path.with_name(sidecar_name(path.name)), record)
    assert rewrite(target="vllm", source=tmp_path / "source", out=tmp_path / "out", as_json=False) == 0
    told = json.loads((tmp_path / "out" / sidecar_name(path.name)).read_text())
    assert told["engine"] == "moegate"
    assert told["detail"] == {"notes": ["USE_TMA was stripped for vllm"], "emitted_for": "vllm"}
