"""Ops of one kernel: the block-FP8 linear layer and the KV store, from the adapter to the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegate.configs import parse_name
from moegate.errors import UsageError
from moegate.records import Provenance, read
from tuner.child.client import ChildSpec, Worker
from tuner.config import Config
from tuner.emit import Origin, emit_all
from tuner.engines import load_adapter
from tuner.finals import Final
from tuner.problem import Problem, parse_shape
from tuner.spaces import space_for

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
        (Problem("store_kv_cache", 1, 4, 64, 1, "fp8_w8a8"), "bfloat16"),
    ],
)
def test_what_has_no_kernel_is_refused(problem: Problem, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_adapter("moegate", problem)
