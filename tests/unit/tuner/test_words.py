"""What people type: shapes, sizes, budgets, models."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.main import get_command

from moegate.configs import BATCH_SIZES
from moegate.errors import UsageError
from tuner.cli import app
from tuner.commands import bench, compare, tune
from tuner.commands.common import parse_budget, parse_sizes
from tuner.commands.compile import run as compile_configs
from tuner.commands.verify import run as verify
from tuner.model import problem_of
from tuner.problem import Problem, parse_shape

OCR = Path(__file__).resolve().parents[3] / "examples/models/deepseek-ocr-2"


def test_shape() -> None:
    assert parse_shape("E=64,N=896,H=1280,topk=6", "fused_experts", "bfloat16") == Problem(
        "fused_experts", 64, 896, 1280, 6, "bfloat16"
    )
    assert parse_shape("N=512,K=1024", "block_fp8_linear", "auto").block_shape == (128, 128)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("E=64", "lacks N, H, topk"),
        ("E=64,E=2,N=1,H=1,topk=1", "no field"),
        ("E=-1,N=1,H=1,topk=1", "positive number"),
        ("E=" + "9" * 5000 + ",N=1,H=1,topk=1", "positive number"),
        ("E=4,N=1,H=1,topk=8", "more than the 4 experts"),
        ("Q=1", "no field"),
        ("E=4,N=8,H=8,topk=1,block_n=128", "come together"),
        ("E=٤,N=8,H=8,topk=1", "positive number"),
    ],
)
def test_bad_shapes_say_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_shape(text, "fused_experts", "bfloat16")


def test_sizes() -> None:
    assert parse_sizes("8,1, 2") == (1, 2, 8)
    assert len(parse_sizes("")) == 18
    assert parse_sizes("1048576") == (1048576,)
    for bad in ("0", "x", "1,,2", "1048577", "9999999999"):
        with pytest.raises(UsageError, match=r"is no batch size \(fix: numbers from 1 to 1048576, such"):
            parse_sizes(bad)


def test_budget() -> None:
    assert parse_budget("3m") == 180
    assert parse_budget("45s") == 45
    assert parse_budget("1.5h") == 5400
    assert parse_budget(None) is None
    for bad in ("-3m", "soon", "0"):
        with pytest.raises(UsageError):
            parse_budget(bad)


def test_problem_of_a_model() -> None:
    problem = problem_of(OCR, None, "fused_experts", "auto")
    assert (problem.E, problem.N, problem.H, problem.topk, problem.dtype) == (64, 896, 1280, 6, "bfloat16")
    assert problem.key("NVIDIA H200").device_name == "NVIDIA_H200"
    assert problem_of(OCR, None, "fused_experts", "fp32").key("cpu").dtype == "float32"
    halved = problem_of(OCR, None, "fused_experts", "auto", tp=2)
    assert halved.N == 448
    split = problem_of(OCR, None, "fused_experts", "auto", tp=2, ep=2)
    assert (split.E, split.N) == (32, 896)


def test_model_or_shape_but_not_both() -> None:
    with pytest.raises(UsageError, match="either"):
        problem_of(None, None, "fused_experts", "auto")
    with pytest.raises(UsageError, match="either"):
        problem_of(OCR, "E=1", "fused_experts", "auto")
    with pytest.raises(UsageError, match="unknown dtype"):
        problem_of(OCR, None, "fused_experts", "int3")


def test_problem_survives_json() -> None:
    problem = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (128, 128), 1)
    assert Problem.from_dict(problem.as_dict()) == problem


@pytest.mark.parametrize("content", [b"{", b"\xff", b"{}", b"[1]", b"[" * 100_000])
def test_a_list_of_files_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "files.json").write_bytes(content)
    with pytest.raises(UsageError):
        compile_configs(targets="sm_90", files=tmp_path / "files.json")


@pytest.mark.parametrize(
    ("ops", "dtypes", "field"), [("", "float32", "--ops"), (" , ", "float32", "--ops"), ("all", ",", "--dtypes")]
)
def test_to_verify_nothing_is_a_mistake(ops: str, dtypes: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="names no") as error:
        verify(ops=ops, dtypes=dtypes, backend="all", out=None, as_json=False)
    assert error.value.field == field


def test_help_names_the_batch_sizes_that_are_the_default() -> None:
    def told(command: str) -> str:
        found = get_command(app).commands[command]  # type: ignore[attr-defined]
        return str(next(option.help for option in found.params if option.name == "batch_sizes"))

    on_cpu = ",".join(map(str, tune._SIZES_ON_CPU))
    assert tune._SIZES_ON_CPU == compare._SIZES_ON_CPU
    for command in ("tune", "compare"):
        assert f"the {len(BATCH_SIZES)} sizes" in told(command)
        assert f"{BATCH_SIZES[0]} to {BATCH_SIZES[-1]} (under Triton's interpreter: {on_cpu})" in told(command)
    assert told("bench").endswith(f"default: {','.join(map(str, bench._DEFAULT_SIZES))}.")


@pytest.mark.parametrize(("op", "refused"), [("store_kv_cache", True), ("block_fp8_linear", False)])
def test_a_graph_of_what_reads_back_to_the_host_is_refused(op: str, refused: bool) -> None:
    with pytest.raises(UsageError, match="no graph can hold it") if refused else nullcontext():
        bench._ensure_capturable(op, "torch")
