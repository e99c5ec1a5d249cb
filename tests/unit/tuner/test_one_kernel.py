"""Ops of one kernel: the block-FP8 linear layer and the KV store, from the adapter to the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moegate.configs import parse_name
from moegate.errors import UsageError
from moegate.kernels import code_hash, hash_of, kernel_files
from moegate.records import Launch, Measurement, Provenance, read
from tuner.child.client import ChildSpec, Worker
from tuner.commands.common import INTERPRETED
from tuner.config import Config
from tuner.emit import Origin, emit_all, single_name
from tuner.engines import load_adapter
from tuner.finals import Final
from tuner.lookup import lookup
from tuner.problem import Problem, parse_shape
from tuner.spaces import space_for
from xkernels.ops.quant import per_token_group_quant_fp8_reference

LINEAR = parse_shape("N=256,K=256", "block_fp8_linear", "auto")
STORE = parse_shape("heads=4,dim=64", "store_kv_cache", "float32")
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}
H200 = {"backend": "cuda", "arch": "90", "warp": 32, "features": ["pdl"], "limits": [232448, 52428800, 132, 4224]}
CASES = [(LINEAR, {**TILE, "SWAP_AB": True}), (STORE, {"num_split": 2})]


@pytest.mark.parametrize(("problem", "config"), CASES, ids=["linear", "store"])
def test_they_are_timed_and_checked(tmp_path: Path, problem: Problem, config: dict[str, int]) -> None:
    worker = Worker(ChildSpec(tmp_path, env={"TRITON_INTERPRET": "1"}), "measure")
    try:
        hello = worker.ask("hello", 120, engine="moegate", problem=problem.as_dict(), sizes=[1, 300])
        defaults = hello["kernel"]["defaults"]
        space = space_for(problem.op, "nvidia")
        assert all(space.complete(Config.of(entry)) == Config.of(entry) for entry in defaults.values())
        worker.ask("setup", 120, engine="moegate", problem=problem.as_dict(), seed=0, routes=2, graphs=False)
        for size in (1, 5):
            answer = worker.ask("measure", 120, size=size, projection="main", config={**config}, reps=2)
            assert len(answer["samples_us"]) == 2, answer
            assert "error" not in worker.ask("verify", 120, size=size, configs={"main": config})
    finally:
        worker.stop()


@pytest.mark.parametrize(("problem", "config"), CASES, ids=["linear", "store"])
def test_one_compile_serves_every_batch_size(tmp_path: Path, problem: Problem, config: dict[str, int]) -> None:
    worker = Worker(ChildSpec(tmp_path, env={"TRITON_CACHE_DIR": str(tmp_path / "cache")}), "compile")
    try:
        words = {"engine": "moegate", "problem": problem.as_dict(), "target": H200, "projection": "main"}
        answers = [worker.ask("compile", 120, **words, size=size, config=config) for size in (1, 5, 64, 4096)]
        assert len({answer["facts"]["hash"] for answer in answers}) == 1
    finally:
        worker.stop()


def test_their_files(tmp_path: Path) -> None:
    origin = Origin("moegate", "hash", "NVIDIA_H200", "GPU-1", "3.8.0", {}, 8, 4, False, "tuner tune")
    for problem, config in CASES:
        files = emit_all(tmp_path, problem, [Final(1, {"main": Config.of(config)}, 5.0, 9.0, verified=True)], origin)
        assert json.loads(files[0].read_text()) == {"1": config}
        assert read(Provenance, files[1]).timings["1"].winner_us == 5.0
    names = sorted(path.name for path in (tmp_path / "dense").iterdir() if "provenance" not in path.name)
    assert names == [
        "N=256,K=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
        "store_kv_cache,heads=4,dim=64,device_name=NVIDIA_H200,dtype=float32.json",
    ]
    assert parse_name(names[0]) is not None


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem("block_fp8_linear", 1, 256, 200, 1, "fp8_w8a8", (128, 128)), "multiple of 128"),
        (Problem("block_fp8_linear", 1, 256, 256, 1, "fp8_w8a8", (32, 32)), "no kernel"),
        (Problem("fused_experts", 4, 130, 256, 1, "fp8_w8a8", (128, 128)), "N must be a multiple of 128"),
        (Problem("fused_experts", 4, 128, 200, 1, "fp8_w8a8", (128, 128)), "H must be a multiple of 128"),
        (Problem("store_kv_cache", 1, 4, 64, 1, "fp8_w8a8"), "bfloat16"),
    ],
)
def test_what_has_no_kernel_is_refused(problem: Problem, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_adapter("moegate", problem)


BENCHED = [
    ("block_fp8_linear", "N=128,K=128", {"5": {**TILE, "SWAP_AB": True}}),
    ("store_kv_cache", "heads=2,dim=32", {"5": {"num_split": 2}}),
]


def _bench(tmp_path: Path, op: str, shape: str, backend: str, configs: str) -> Launch:
    command = [sys.executable, "-P", "-m", "tuner", "bench", "--op", op, "--shape", shape, "--dtype", "float32",
               "--batch-sizes", "1,5", "--moe-runner-backend", backend, "--configs", configs, "--out",
               str(tmp_path / "bench.json")]  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, env=plain, text=True)
    measurement = read(Measurement, tmp_path / "bench.json")
    assert measurement.interpreter == (backend == "triton")
    assert (f"\n{INTERPRETED}\n" in done.stdout) == measurement.interpreter
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == [
        "kernel_time_m1:", "kernel_time_m5:", "kernel_time_geomean:",
    ]  # fmt: skip
    assert "kernel_time" not in done.stderr
    return measurement.launches[0]


@pytest.mark.parametrize(("op", "shape", "entries"), BENCHED, ids=[op for op, _, _ in BENCHED])
def test_the_bench_runs_them_with_their_file(tmp_path: Path, op: str, shape: str, entries: dict[str, Any]) -> None:
    problem = parse_shape(shape, op, "float32")
    path = tmp_path / "tuned/dense" / single_name(problem, "cpu")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(entries))
    launch = _bench(tmp_path, op, shape, "triton", str(tmp_path / "tuned"))
    assert launch.proof is not None
    assert launch.proof.kernels == {op: hash_of(kernel_files(op))}
    assert launch.proof.kernel_hash == code_hash()
    assert [(use.projection, use.batch_size, use.reason, use.file) for use in launch.proof.configs] == [
        ("main", size, "exact", path.name) for size in (1, 5)
    ]
    assert all(use.config == entries["5"] for use in launch.proof.configs)
    plain = _bench(tmp_path, op, shape, "torch", str(tmp_path / "tuned"))
    assert plain.proof is not None
    assert plain.proof.configs == ()
    assert plain.proof.calls.keys() == {"torch"}


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"x": {"num_split": 1}}', '{"1": {"num_split": 0}}', '{"1": {"num_split": "1"}}', '{"1": 1}',
             '{"1": {"num_split": 65536}}']
)  # fmt: skip
def test_a_damaged_file_of_the_store_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / single_name(STORE, "cpu")).write_text(text)
    with pytest.raises(UsageError, match="is no file of this op"):
        lookup(STORE, tmp_path, "cpu", "3.8.0", lambda size: {"num_split": size})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "must be an object"),
        ('{"01": {}}', "is no batch size"),
        ('{"1": {"BLOCK_SIZE_M": 16}}', "has no BLOCK_SIZE_N: nothing can be launched"),
        (json.dumps({"1": {**TILE, "BLOCK_SIZE_M": 1}}), "BLOCK_SIZE_M at batch size 1 is 1"),
        (json.dumps({"1": {**TILE, "SWAP_AB": "x"}}), "SWAP_AB at batch size 1 is 'x'"),
    ],
)
def test_a_damaged_file_of_the_linear_layer_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / single_name(LINEAR, "cpu")
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as error:
        lookup(LINEAR, tmp_path, "cpu", "3.8.0", lambda size: {})
    assert error.value.file == str(path)
    without = {name: value for name, value in TILE.items() if name != "num_warps"}
    path.write_text(json.dumps({"1": without}))  # the compiler has a default of it
    assert lookup(LINEAR, tmp_path, "cpu", "3.8.0", lambda size: {}).at(1).configs == {"main": without}


def test_without_a_file_the_launchers_own_rule_counts(tmp_path: Path) -> None:
    for root in (None, tmp_path):
        found = lookup(STORE, root, "cpu", "3.8.0", lambda size: {"num_split": size}).at(3)
        assert found.configs == {"main": {"num_split": 3}}
        assert [(use.reason, use.file) for use in found.uses] == [("default", None)]
    with pytest.raises(UsageError, match="is no folder"):
        lookup(STORE, tmp_path / "nowhere", "cpu", "3.8.0", lambda size: None)


def test_weights_are_laid_out_again_for_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.engines.dense.per_token_group_quant_fp8", per_token_group_quant_fp8_reference)
    adapter = load_adapter("moegate", parse_shape("N=256,K=512", "block_fp8_linear", "auto"))
    adapter.setup(torch.device("cpu"), 0, 1)
    batch: Any = adapter.batch(5, [(torch.empty(0), torch.empty(0))])
    moved = batch._moved(batch._weight(0))
    assert moved.layout == "scaled_mm"
    assert moved is batch._moved(batch._weight(0))
    assert torch.equal(moved.scale, batch._weight(0).scale)
    assert batch.check_whole(batch.whole_by("torch", 0)).ok
    store: Any = load_adapter("moegate", STORE).batch(1, [(torch.empty(0), torch.empty(0))])
    with pytest.raises(UsageError, match="does not store"):
        store.whole_by("scaled_mm", 0)
