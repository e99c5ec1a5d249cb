# ruff: noqa: E501 - command lines read best on one line
"""What each kind of cell starts, and what it believes of the answer."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moegate import canonical
from moegate.records import (
    ArmSpec,
    Case,
    ConfigUse,
    DeviceIdentity,
    Launch,
    Measurement,
    ModelSpec,
    PlannedCell,
    PoolSpec,
    Proof,
    Provenance,
    write,
)
from orchestrator.cells import KINDS, Work, wrong_proof
from orchestrator.cells.base import PYTHON

CPU = DeviceIdentity("cpu", "c", "cpu:host")
MODEL = ModelSpec("tiny", "/models/tiny/config.json", "0" * 64, dtype="float32")
AXES = {
    "pool": "cpu", "model": "tiny", "op": "fused_experts", "dtype": "float32", "batch_sizes": [1, 16], "engine": "moegate",
    "moe_runner_backend": "triton", "graph": "eager", "effort": "quick", "samples": "/s.jsonl",
    "load": {"requests": 8, "concurrency": 4, "input": 16, "output": 32, "seed": 7},
}  # fmt: skip


def work(kind: str, tmp_path: Path, configs: Path | None = None, **axes) -> Work:
    cell = PlannedCell("id", kind, "label", {**AXES, **axes}, "", 60.0, ("a", "b"), "cpu", "tiny")
    arm = ArmSpec("b", configs="tuned" if configs else "none")
    return Work(cell, MODEL, PoolSpec("cpu", "cpu"), arm, configs, tmp_path, 5)


LINES = {
    "check": "orchestrator check --json --engine moegate --models /models/tiny/config.json",
    "kernel-test": "tuner verify --ops=fused_experts --dtypes=float32 --backend=all --out=F/measurement.json",
    "tune": "tuner tune --model=/models/tiny/config.json --op=fused_experts --dtype=float32 --effort=quick "
            "--batch-sizes=1,16 --out=F/tuned --result=F/measurement.json",
    "kernel-bench": "tuner bench --model=/models/tiny/config.json --op=fused_experts --dtype=float32 --batch-sizes=1,16 "
                    "--configs=none --moe-runner-backend=triton --graph=eager --seed=5 --out=F/measurement.json",
    "serve": "serving launch --engine=moegate --model=/models/tiny/config.json --weights=random --dtype=float32 "
             "--moe-runner-backend=triton --graph=eager --configs=none --port=0 --seed=5 -- {python} -P -m serving bench "
             "--requests=8 --concurrency=4 --input=16 --output=32 --seed=7 --out=F/measurement.json",
    "accuracy": "serving launch --engine=moegate --model=/models/tiny/config.json --weights=random --dtype=float32 "
                "--moe-runner-backend=triton --graph=eager --configs=none --port=0 --seed=5 -- {python} -P -m serving "
                "accuracy --samples=/s.jsonl --out=F/measurement.json",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_command_line_of_each_kind(tmp_path, kind):
    command = KINDS[kind].command(work(kind, tmp_path))
    assert command.argv[:3] == (PYTHON, "-P", "-m")
    assert " ".join(command.argv[3:]).replace(str(tmp_path), "F") == LINES[kind]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_commands_are_ones_that_exist(tmp_path, kind):
    """Every option that we write is one that the program's own help shows."""
    argv = KINDS[kind].command(work(kind, tmp_path)).argv
    parts = [argv[: argv.index("--")], argv[argv.index("--") + 1 :]] if "--" in argv else [argv]
    for part in parts:
        program, command, options = part[3], part[4], [arg.split("=")[0] for arg in part[5:] if arg.startswith("--")]
        done = subprocess.run(
            [sys.executable, "-P", "-m", program, command, "--help"], capture_output=True, text=True, timeout=60,
            env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not [option for option in options if option not in done.stdout]


def test_tensor_parallel_models_and_open_loops_are_said(tmp_path):
    base = work("serve", tmp_path, load={"requests": 8, "rate": 2.5, "input": 1, "output": 1, "seed": 0})
    argv = KINDS["serve"].command(replace(base, model=replace(MODEL, tp=4, weights="/w"))).argv
    assert {"--tp=4", "--rate=2.5", "--weights=/w"} <= set(argv)
    reads = KINDS["serve"].command(replace(base, model=replace(MODEL, weights="/w"), configs=tmp_path)).reads
    assert set(reads) == {Path("/models/tiny/config.json"), Path("/w"), tmp_path}


def test_servers_that_stay_up_together_share_memory_and_take_turns(tmp_path):
    argv = KINDS["serve"].command(work("serve", tmp_path, residency="both")).argv
    at = argv.index("--")
    assert "--memory-share=0.5" in argv[:at]
    assert {"--rounds=2", f"--turns={tmp_path / 'turns'}"} <= set(argv[at:])
    swapped = KINDS["serve"].command(work("serve", tmp_path, residency="swap")).argv
    assert not [arg for arg in swapped if arg.startswith(("--memory-share", "--rounds", "--turns"))]
    for program, option in (("launch", "--memory-share"), ("bench", "--turns"), ("bench", "--rounds")):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "serving", program, "--help"], capture_output=True, text=True
        )
        assert option in done.stdout


def measurement(proof: Proof | None) -> Measurement:
    return Measurement("serve", "ok", CPU, {}, {"n": 1}, (Launch(CPU, "t", 0.0, proof=proof),))


def proof(**more) -> Proof:
    return Proof("moegate", "triton", "triton", calls={"triton": 3}, **more)


def use(reason: str) -> ConfigUse:
    return ConfigUse("fused_experts", "up", 2, "E=8.json" if reason != "default" else None, reason, {})


def test_a_proof_that_holds(tmp_path):
    tree = tmp_path / "tree"
    (tree / "configs").mkdir(parents=True)
    (tree / "configs" / "E=8.json").write_text("{}")
    assert wrong_proof(work("serve", tmp_path), measurement(proof(configs=(use("default"),)))) is None
    for root in (tree, tree / "configs"):
        good = proof(configs=(use("exact"),), configs_digest=canonical.tree_digest(root))
        assert wrong_proof(work("serve", tmp_path, tree), measurement(good)) is None


WRONG = {
    "no proof": (None, "does not say"),
    "other engine": (replace(proof(), engine="vllm"), "got vllm"),
    "other request": (replace(proof(), requested_backend="auto"), "was told auto"),
    "other backend": (replace(proof(), resolved_backend="torch", calls={"torch": 3}), "got torch"),
    "calls elsewhere": (replace(proof(), calls={"triton": 3, "torch": 1}), "calls went to torch"),
    "no calls": (replace(proof(), calls={"triton": 0}), "no call reached"),
    "configs where none were asked for": (proof(configs=(use("exact"),)), "asked for no configs"),
}


@pytest.mark.parametrize(("given", "why"), WRONG.values(), ids=list(WRONG))
def test_a_proof_that_contradicts_its_arm(tmp_path, given, why):
    assert why in (wrong_proof(work("serve", tmp_path), measurement(given)) or "")


def test_a_tuned_arm_must_have_read_its_tree_and_used_it(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "E=8.json").write_text("{}")
    other = proof(configs=(use("exact"),), configs_digest="0" * 64)
    assert "another tree" in (wrong_proof(work("serve", tmp_path, tree), measurement(other)) or "")
    unused = proof(configs=(use("default"),), configs_digest=canonical.tree_digest(tree))
    assert "fell back" in (wrong_proof(work("serve", tmp_path, tree), measurement(unused)) or "")
    control = replace(unused, requested_backend="auto", resolved_backend="torch", calls={"torch": 1}, configs=())
    assert wrong_proof(work("serve", tmp_path, tree, moe_runner_backend="auto"), measurement(control)) is None


@pytest.mark.parametrize(
    ("record", "kernels", "why"),
    [
        ({}, {"fused_experts": "b" * 64}, "was tuned on kernel aaaaaaaaaaaa, the launch ran bbbbbbbbbbbb"),
        ({}, {"fused_experts": "a" * 64}, None),
        ({}, {}, None),  # a commit from before launches said so
        ({"engine": "sglang"}, {"fused_experts": "b" * 64}, None),
        ({"detail": {"problem": {"op": "block_fp8_linear"}}}, {"fused_experts": "b" * 64}, None),
        (None, {"fused_experts": "b" * 64}, "E=8.provenance.json: not JSON"),
    ],
)
def test_tuned_configs_and_the_kernel_that_ran(tmp_path, record, kernels, why):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "E=8.json").write_text("{}")
    sidecar = tree / "E=8.provenance.json"
    if record is None:
        sidecar.write_text("{")
    else:
        fields = {"origin": "measured", "engine": "moegate", "date": "2026-10-01", "kernel_hash": "a" * 64, **record}
        write(sidecar, Provenance(**fields))
    good = proof(configs=(use("exact"),), configs_digest=canonical.tree_digest(tree), kernels=kernels)
    found = wrong_proof(work("serve", tmp_path, tree), measurement(good))
    assert found is None if why is None else why in (found or "")


def test_skipped_cases_are_no_work(tmp_path):
    base = measurement(None)
    judge = KINDS["kernel-test"].judge
    assert "no case" in (judge(work("kernel-test", tmp_path), replace(base, cases=(Case("a", "skipped"),))) or "")
    assert "1 of 2" in (
        judge(work("kernel-test", tmp_path), replace(base, cases=(Case("a", "passed"), Case("b", "failed")))) or ""
    )
    assert (
        judge(work("kernel-test", tmp_path), replace(base, cases=(Case("a", "passed"), Case("b", "skipped")))) is None
    )
