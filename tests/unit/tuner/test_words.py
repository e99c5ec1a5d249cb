"""What people type: shapes, sizes, budgets, models."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from moegate.configs import BATCH_SIZES
from moegate.errors import InfraError, UsageError
from tuner.cli import app
from tuner.commands import FEW_SIZES, bench, tune
from tuner.commands.common import parse_budget, parse_sizes
from tuner.commands.compile import run as compile_configs
from tuner.commands.verify import run as verify
from tuner.finals import Final
from tuner.model import problem_of
from tuner.pipeline import TuneOptions
from tuner.problem import Problem, parse_shape
from tuner.ray.lease import lease_argv
from tuner.strategies.base import Cut

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
        ("E=4,N=8,H=8,topk=2,shared=9", "9 shared experts leave none of 4"),
        ("E=4,N=8,H=8,topk=2,shared=2", "no slot of 2"),
        ("E=4,N=8,H=8,topk=2,ep=0", "positive number"),
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
    assert parse_budget("1h30m") == parse_budget("90 min") == 5400
    assert parse_budget("60") == 60
    assert parse_budget("1d2h3m4.5s") == 93784.5
    assert parse_budget(None) is None
    for bad in ("-3m", "soon", "0", "0s", "", " ", "s", "5s1h", "1h30", "3mm", "3ms", "9" * 400, "٣s", "inf"):
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


CHANNELS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
    "num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {
    "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("quantised", "words"),
    [({"quant_method": "mxfp4"}, "mxfp4"), ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
     (CHANNELS, "fp8_w8a8 with scales per channel")],
)  # fmt: skip
def test_a_models_quantisation_that_nothing_is_tuned_for_is_no_bfloat16(
    quantised: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Its engine would look for a file of another name."""
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((OCR / "config.json").read_text()) | {"quantization_config": quantised})
    )
    with pytest.raises(UsageError, match=f"the experts are {words}") as error:
        problem_of(tmp_path, None, "fused_experts", "auto")
    assert error.value.field == "quantization_config"
    assert problem_of(tmp_path, None, "fused_experts", "bf16").dtype == "bfloat16"


def test_model_or_shape_but_not_both() -> None:
    with pytest.raises(UsageError, match="either"):
        problem_of(None, None, "fused_experts", "auto")
    with pytest.raises(UsageError, match="either"):
        problem_of(OCR, "E=1", "fused_experts", "auto")
    with pytest.raises(UsageError, match="unknown dtype"):
        problem_of(OCR, None, "fused_experts", "int3")


@pytest.mark.parametrize("words", ["heads=1,dim=8,shared=1", "heads=1,dim=8,block_n=8,block_k=8", "heads=1,dim=8,ep=2"])
def test_what_an_op_has_not_is_no_part_of_its_shape(words: str) -> None:
    with pytest.raises(UsageError, match="no field of this shape"):
        parse_shape(words, "store_kv_cache", "float32")


def test_a_shape_is_of_one_rank() -> None:
    problem = problem_of(None, "E=4,N=8,H=8,topk=6,ep=2", "fused_experts", "float32")
    assert (problem.E, problem.ep) == (4, 2)
    for words, field in (({"tp": 2}, "--tp"), ({"ep": 2}, "--ep")):
        with pytest.raises(UsageError, match="one rank's") as error:
            problem_of(None, "E=4,N=8,H=8,topk=2", "fused_experts", "float32", **words)  # type: ignore[arg-type]
        assert error.value.field == field


@pytest.mark.parametrize(("op", "shape"), [("store_kv_cache", "heads=..,dim=.."), ("block_fp8_linear", "N=..,K=..")])
def test_a_model_does_not_tell_the_shape_of_another_op(op: str, shape: str) -> None:
    with pytest.raises(UsageError, match="does not tell the shape") as error:
        problem_of(OCR, None, op, "auto")
    assert error.value.fix == f"--shape {shape}"


def test_a_model_without_experts_is_named_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    with pytest.raises(UsageError, match="'LlamaForCausalLM': no MoE model that is known"):
        problem_of(tmp_path, None, "fused_experts", "auto")


TINY = Problem("fused_experts", 8, 64, 128, 2, "float32")
LEASED = [
    parse_shape("heads=4,dim=64", "store_kv_cache", "float32"),
    parse_shape("N=512,K=1024,block_n=1,block_k=128", "block_fp8_linear", "auto"),
    Problem("fused_experts", 9, 64, 128, 3, "fp8_w8a8", (128, 128), shared=1, ep=4),
    TINY,
]


@pytest.mark.parametrize("problem", LEASED)
def test_a_lease_tunes_the_problem_itself(problem: Problem) -> None:
    argv = lease_argv(TuneOptions(problem, (1,), Path("out")), (1,))
    told = dict(pairwise(argv))
    assert problem_of(None, told["--shape"], told["--op"], told["--dtype"]) == problem


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["tune", "--out", ""], "--out"),
        (["tune", "--out", "x", "--result", ""], "--result"),
        (["tune", "--out", "x", "--model", " "], "--model"),
        (["tune", "--out", "x", "--routing", ""], "--routing"),
        (["tune", "--out", "x", "--ray", ""], "--ray"),
        (["bench", "--configs", ""], "--configs"),
        (["bench", "--reps", "10001"], "--reps"),
        (["verify", "--out", ""], "--out"),
        (["replay", "--journal", ""], "--journal"),
        (["replay", "--journal", "x", "--out", ""], "--out"),
        (["compare", "", "none"], "a"),
        (["compare", "none", ""], "b"),
        (["compare", "none", "none", "--launches", "501"], "--launches"),
        (["compare", "none", "none", "--rounds", "10001"], "--rounds"),
        (["emit", "", "--for", "vllm", "--out", "x"], "source"),
        (["emit", "x", "--for", "vllm", "--out", ""], "--out"),
        (["compile", "--jobs", "-1"], "--jobs"),
        (["compile", "--jobs", "1025"], "--jobs"),
        (["compile", "--configs", ""], "--configs"),
        (["compile", "--out", ""], "--out"),
    ],
)
def test_empty_words_and_counts_beyond_reason_are_refused(words: list[str], field: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"Invalid value for '{field}'" in done.output


@pytest.mark.parametrize("engine", ["", "acme", "os:getcwd"])
def test_every_command_knows_the_same_engines(engine: str) -> None:
    shape = ["--shape", "E=4,N=16,H=16,topk=2", "--engine", engine]
    for words in (["tune", "--out", "x"], ["bench"], ["compare", "none", "none"]):
        done = CliRunner().invoke(app, [*words, *shape])
        assert isinstance(done.exception, UsageError)
        assert str(done.exception) == f"--engine: unknown engine {engine!r} (fix: one of moegate, sglang, vllm)"


def test_an_architecture_that_the_prior_lacks_is_told_before_a_child_starts(tmp_path: Path) -> None:
    words = ["tune", "--out", str(tmp_path / "out"), "--shape", "E=4,N=16,H=16,topk=2", "--without", "sm_1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError)
    assert done.exception.field == "--without"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Storage size calculation overflowed with sizes=[1]\nmore"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)"),
        MemoryError("x"),
    ],
)
def test_what_no_memory_holds_is_told_so(error: Exception) -> None:
    words = r"fused_experts does not fit into the memory here: [^\n]+$"
    with pytest.raises(InfraError, match=words), bench._fitting(TINY):
        raise error
    with pytest.raises(RuntimeError, match="defect"), bench._fitting(TINY):
        raise RuntimeError("defect")


def test_problem_survives_json() -> None:
    problem = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (128, 128), 1)
    assert Problem.from_dict(problem.as_dict()) == problem


@pytest.mark.parametrize("content", [b"{", b"\xff", b"{}", b"[1]", b"[" * 100_000])
def test_a_list_of_files_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "files.json").write_bytes(content)
    with pytest.raises(UsageError):
        compile_configs(targets="sm_90", files=tmp_path / "files.json")


def test_compile_says_what_it_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tuner.compile.run.missing", lambda target: f"no compiler for {target.name}")
    compile_configs(targets="sm_90,bmg", variants="basic")
    assert capsys.readouterr().out.splitlines()[-1] == "kernels for sm_90, bmg: 2 skipped"


@pytest.mark.parametrize(
    ("ops", "dtypes", "field"), [("", "float32", "--ops"), (" , ", "float32", "--ops"), ("all", ",", "--dtypes")]
)
def test_to_verify_nothing_is_a_mistake(ops: str, dtypes: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="names no") as error:
        verify(ops=ops, dtypes=dtypes, backend="all", out=None, as_json=False)
    assert error.value.field == field


def test_the_table_of_a_tuning_heads_a_ratio_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    done: Any = SimpleNamespace(
        interpreter=False, device=SimpleNamespace(name="D"), finals=(Final(16, {}, 100.0, 156.0),), failed={}, files=(),
        counts={"evaluations": 1, "measured": 1, "reused": 0}, seconds={"race": 1.0}, cut={},
    )  # fmt: skip
    options: Any = SimpleNamespace(problem=TINY, budget_s=90.0)
    tune._print(options, done)
    _, head, row, _ = capsys.readouterr().out.splitlines()
    end = head.index("default/tuned") + len("default/tuned")
    assert row[:end].split() == ["16", "100.0", "156.0", "1.56"]
    assert row[end - 1] == "6"
    done.cut = {4: Cut("", {"up": 40, "down": 20}, {"up": 24, "down": 3}), 16: Cut("varied", {"up": 4}, {"up": 4})}
    tune._print(options, done)
    assert capsys.readouterr().out.splitlines()[3:-1] == [
        "the budget of 1 min 30 s cut the search short; measured of the candidates asked for:",
        "     4 up 24 of 40, down 3 of 20",
        "    16 up 4 of 4; came to: varied",
    ]


def test_help_names_the_batch_sizes_that_are_the_default() -> None:
    def told(command: str) -> str:
        found = get_command(app).commands[command]  # type: ignore[attr-defined]
        return str(next(option.help for option in found.params if option.name == "batch_sizes"))

    on_cpu = ",".join(map(str, FEW_SIZES))
    for command in ("tune", "compare"):
        assert f"the {len(BATCH_SIZES)} sizes" in told(command)
        assert f"{BATCH_SIZES[0]} to {BATCH_SIZES[-1]} (under Triton's interpreter: {on_cpu})" in told(command)
    assert told("bench").endswith(f"default: {on_cpu}.")


@pytest.mark.parametrize(("op", "refused"), [("store_kv_cache", True), ("block_fp8_linear", False)])
def test_a_graph_of_what_reads_back_to_the_host_is_refused(op: str, refused: bool) -> None:
    with pytest.raises(UsageError, match="no graph can hold it") if refused else nullcontext():
        bench._ensure_capturable(op, "torch")
