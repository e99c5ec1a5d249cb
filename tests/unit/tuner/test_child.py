"""The disposable child, for real: configs that hang, crash, lie and raise, and what is left of the sweep after them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moegate.errors import InfraError
from moegate.journal import Journal
from tuner.ahead import Compiled, CompilePool, Job
from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.child.worker import classify
from tuner.config import Config
from tuner.finals import Finals
from tuner.journaled import PURPOSE
from tuner.live import Live, LiveOptions, Strike
from tuner.problem import Problem
from tuner.strategies.base import Choice, Outcome, Request, Unit, measure

ENGINES = Path(__file__).parent / "engines"
PROBLEM = Problem("fused_experts", 8, 64, 128, 2, "float32")
GOOD = Config.of({"BLOCK_SIZE_M": 16})
OPTIONS = LiveOptions("planted_cpu:make", routes=1, graphs=False, deadline_s=6.0)


def _spec(folder: Path) -> ChildSpec:
    return ChildSpec(folder, env={"PYTHONPATH": str(ENGINES), "TRITON_INTERPRET": "1"})


def _bad(fault: str) -> Config:
    return GOOD.with_(FAULT=fault)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Live, list[Strike]]]:
    strikes: list[Strike] = []
    runner = Live(_spec(tmp_path), PROBLEM, OPTIONS, strikes.append)
    yield runner, strikes
    runner.close()


def _measure(live: Live, config: Config, size: int = 4, rung: int = 0) -> Outcome:
    return measure(live, [Request(Unit(size, "up", config), rung, 2)])[0]


@pytest.mark.slow
def test_bad_configs_are_survived_and_classified(live: tuple[Live, list[Strike]]) -> None:
    runner, strikes = live
    expected = {
        "hang": "timeout", "segfault": "crashed", "abort": "crashed", "exception": "exception",
        "memory": "out-of-memory", "illegal": "illegal-access", "unwritten": "wrong-result", "wrong": "wrong-result",
        "chatty": None,
    }  # fmt: skip
    found = {}
    for fault in expected:
        outcome = _measure(runner, _bad(fault))
        found[fault] = outcome.error
        assert (outcome.error is None) == bool(outcome.samples_us)
        assert outcome.error is None or outcome.reason
    assert found == expected
    assert _measure(runner, GOOD).error is None
    # Losses are tried twice, once more in a fresh child; answers that are merely errors are not.
    struck = [strike.unit.config.get("FAULT") for strike in strikes]
    assert sorted(struck) == sorted(["hang", "segfault", "abort", "illegal"] * 2)
    starts = runner.worker.starts
    again = _measure(runner, _bad("segfault"), size=8)
    assert again.error == "blocklisted"
    assert runner.worker.starts == starts


def test_a_killed_child_is_replaced_and_nobody_is_blamed(live: tuple[Live, list[Strike]]) -> None:
    runner, _ = live
    first = runner.worker.pid
    assert first is not None
    os.kill(first, 9)
    assert _measure(runner, GOOD).error is None
    assert runner.worker.pid != first


def test_answers_of_several_units_come_in_order(live: tuple[Live, list[Strike]]) -> None:
    runner, _ = live
    units = [Unit(size, "up", GOOD.with_(num_warps=warps)) for size in (2, 4) for warps in (4, 8)]
    outcomes = measure(runner, [Request(unit, 0, 3) for unit in units])
    assert [outcome.unit for outcome in outcomes] == units
    assert all(len(outcome.samples_us) == 3 for outcome in outcomes)


def test_a_slow_config_is_given_up_early(live: tuple[Live, list[Strike]]) -> None:
    runner, _ = live
    outcome = measure(runner, [Request(Unit(4, "up", GOOD), 0, 5, lambda: 1e-3)])[0]
    assert len(outcome.samples_us) == 1


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tuner.child.client import ChildSpec, Worker\n"
        f"w = Worker(ChildSpec(Path({str(tmp_path)!r}), env={{'TRITON_INTERPRET': '1'}}), 'w')\n"
        "w.ask('hello', 120); print(w.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(1200):
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]:
                break
        except OSError:  # between two looks it has gone
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child outlived its parent")
    parent.stdin.close()
    parent.stdout.close()


def test_the_child_needs_no_third_party_of_the_command_line(tmp_path: Path) -> None:
    code = (
        "import sys, tuner.child.session, tuner.engines.moegate\n"
        "bad = {'pydantic', 'typer', 'yaml', 'rich', 'jinja2', 'scipy', 'docker', 'ray'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(bad)) or 0)"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_child_that_cannot_start_is_an_infrastructure_error(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="no_such_engine"):
        Live(_spec(tmp_path), PROBLEM, LiveOptions("no_such_engine:make"))


def test_places_that_a_variable_names_are_those_of_the_parents_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"SGLANG_KERNEL": "wheel/moe.py", "TRITON_CACHE_DIR": "cache", "TRITON_PTXAS_PATH": "ptxas",
             "TRITON_CUOBJDUMP_PATH": "bin/cuobjdump", "ZE_AFFINITY_MASK": "0/1", "TRITON_HOME": "/opt"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    env = ChildSpec(tmp_path / "children").environment()
    assert {name: env[name] for name in given} == given | {
        name: f"{tmp_path}/{given[name]}" for name in ("SGLANG_KERNEL", "TRITON_CACHE_DIR", "TRITON_CUOBJDUMP_PATH")
    }


def test_losing_a_worker_says_how(tmp_path: Path) -> None:
    worker = Worker(ChildSpec(tmp_path, python="/bin/false"), "w")
    with pytest.raises(WorkerLost, match="exited with status 1"):
        worker.ask("hello", 5)


def test_classify() -> None:
    assert classify(RuntimeError("CUDA error: misaligned address")) == ("illegal-access", True)
    assert classify(RuntimeError("CUDA out of memory. Tried to allocate")) == ("out-of-memory", False)
    assert classify(ValueError("x")) == ("exception", False)
    resources = type("OutOfResources", (Exception,), {})
    assert classify(resources("out of resource: shared memory, Required: 3")) == ("over-shared", False)


def test_finals_reject_what_is_wrong_or_moody(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", purpose=PURPOSE) as journal:
        finals = Finals(_spec(tmp_path / "children"), PROBLEM, OPTIONS, journal, "env")
        finals.warm()
        finals.settle()
        time.sleep(0.2)
        assert finals.worker.ask("hello", 60)["pid"] == finals.worker.pid
        # A child dies with the thread that started it, which must not be the one that warmed it.
        assert finals.worker.starts == 1
        default = {"up": GOOD, "down": GOOD}
        contenders = tuple({"up": _bad(fault), "down": _bad(fault)} for fault in ("segfault", "wrong", "moody"))
        try:
            final = finals.play(Choice(4, contenders[0], 1.0, contenders), default, 3)  # type: ignore[arg-type]
        finally:
            finals.close()
        assert final.kept_default
        assert final.verified
        notes = " ".join(final.notes)
        assert "crashed" in notes
        written = len(journal.entries)
        # Played again over the same journal, nothing is asked.
        again = Finals(_spec(tmp_path / "none"), PROBLEM, OPTIONS, journal, "env")
        assert again.play(Choice(4, contenders[0], 1.0, contenders), default, 3) == final  # type: ignore[arg-type]
        assert len(journal.entries) == written


H200 = {"backend": "cuda", "arch": "90", "warp": 32, "features": ["pdl"], "limits": [232448, 52428800, 132, 4224]}
TILE = Config.of(
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
)
MANY = Config.of(
    {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_warps": 8,
     "num_stages": 4, "USE_TMA": True}
)  # fmt: skip
SINGLE = TILE.with_(BLOCK_SIZE_M=1, BLOCK_SIZE_N=32, BLOCK_SIZE_K=256)
HOPPER = {**H200, "features": ["pdl", "wgmma"]}


@pytest.mark.parametrize(
    ("dtype", "block", "target", "config"),
    [("bfloat16", None, H200, TILE), ("fp8_w8a8", (128, 128), HOPPER, MANY), ("bfloat16", None, H200, SINGLE)],
    ids=["any rows", "many rows", "single rows"],
)
def test_one_compile_serves_every_batch_size(
    tmp_path: Path, dtype: str, block: tuple[int, int] | None, target: dict[str, Any], config: Config
) -> None:
    problem = Problem("fused_experts", 64, 896, 1280, 6, dtype, block)
    worker = Worker(ChildSpec(tmp_path, env={"TRITON_CACHE_DIR": str(tmp_path / "cache")}), "compile")
    hashes = {}
    try:
        for projection in ("up", "down"):
            for size in (1, 5, 64, 4096):
                answer = worker.ask(
                    "compile", 120, engine="moegate", problem=problem.as_dict(), target=target, size=size,
                    projection=projection, config=config.as_dict(),
                )  # fmt: skip
                assert "error" not in answer, answer
                assert 0 < answer["facts"]["shared"] <= 232448
                assert answer["facts"]["spill_bytes"] in (0, None)
                hashes.setdefault(projection, set()).add(answer["facts"]["hash"])
    finally:
        worker.stop()
    assert [len(found) for found in hashes.values()] == [1, 1]


def _wait(pool: CompilePool, job: Job) -> Compiled:
    pool.prepare([job])
    while (done := pool.result(job)) is None:
        pool.poll()
    return done


def test_the_pool_compiles_each_config_once_and_prunes_by_facts(tmp_path: Path) -> None:
    problem = Problem("fused_experts", 8, 128, 256, 2, "float16")
    pool = CompilePool(ChildSpec(tmp_path, env={"TRITON_CACHE_DIR": str(tmp_path / "cache")}), "moegate", problem, 1)
    try:
        pool.aim(H200)
        jobs = [("up", TILE.with_(num_stages=stages)) for stages in (2, 4)]
        pool.helpers((0, 64))
        pool.prepare(jobs)
        pool.prepare(jobs)
        shared = [_wait(pool, job).facts["shared"] for job in jobs]  # type: ignore[union-attr,index]
        assert shared[0] < shared[1]
        assert pool.count == 2
        assert pool.binaries() == 2
        broken = _wait(pool, ("up", TILE.with_(BLOCK_SIZE_M=48)))  # no power of two
        assert broken.error == "compile-failed"
        assert broken.reason
        waiting: list[Job] = [("down", TILE.with_(num_stages=stages)) for stages in (2, 3, 4, 5)]
        pool.prepare(waiting)
        pool.drop()  # all but the one that a child may have begun
        assert _wait(pool, jobs[0]).facts is not None
        assert _wait(pool, waiting[-1]).facts is not None
        assert sum(pool.result(job) is None for job in waiting[1:3]) == 2
        # Given up before the last stages.
        large = _wait(pool, ("up", TILE.with_(BLOCK_SIZE_N=128, BLOCK_SIZE_K=256, num_stages=5)))
        assert large.error == "over-shared"
        assert "232448" in large.reason
    finally:
        pool.close()


def _engine_child(tmp_path: Path, name: str, file: Path, **env: str) -> Worker:
    assert file.is_file()
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), f"{name.upper()}_KERNEL": str(file), **env}
    return Worker(ChildSpec(tmp_path, env=variables), name)


SMALL = TILE.with_(BLOCK_SIZE_M=16, BLOCK_SIZE_N=64, BLOCK_SIZE_K=64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [
        Problem("fused_experts", 8, 32, 64, 2, "float32"),
        Problem("fused_experts", 4, 128, 128, 2, "fp8_w8a8", (128, 128)),
    ],
    ids=["float32", "fp8"],
)
def test_sglangs_own_kernel_is_timed_and_checked(tmp_path: Path, sglang_wheel: Path, problem: Problem) -> None:
    file = sglang_wheel / "sglang/kernels/ops/moe/fused_moe_triton_kernels.py"
    worker = _engine_child(tmp_path, "sglang", file, TRITON_INTERPRET="1")
    try:
        ready = worker.ask("setup", 120, engine="sglang", problem=problem.as_dict(), seed=0, routes=1)
        assert len(ready["kernel_hash"]) == 64
        for projection in ("up", "down"):
            answer = worker.ask("measure", 120, size=5, projection=projection, config=SMALL.as_dict(), reps=2)
            assert len(answer["samples_us"]) == 2, answer
        if problem.dtype == "float32":  # interpreted stores to bfloat16 cut digits off, and FP8 rows then differ
            both = {"up": SMALL.as_dict(), "down": SMALL.as_dict()}
            assert worker.ask("verify", 120, size=2, configs=both)["max_rel"] < 1e-5
    finally:
        worker.stop()


@pytest.mark.slow
def test_sglangs_own_kernel_compiles_once_per_config(tmp_path: Path, sglang_wheel: Path) -> None:
    file = sglang_wheel / "sglang/kernels/ops/moe/fused_moe_triton_kernels.py"
    worker = _engine_child(tmp_path, "sglang", file)
    problem = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (128, 128))
    found: dict[tuple[str, bool], set[str]] = {}
    try:
        for projection in ("up", "down"):
            for tma in (False, True):
                config = {**SMALL.as_dict(), **({"USE_TMA": True} if tma else {})}
                for size in (1, 64, 4096):
                    answer = worker.ask(
                        "compile", 120, engine="sglang", problem=problem.as_dict(), target=H200, size=size,
                        projection=projection, config=config,
                    )  # fmt: skip
                    assert "error" not in answer, answer
                    found.setdefault((projection, tma), set()).add(answer["facts"]["hash"])
    finally:
        worker.stop()
    assert all(len(hashes) == 1 for hashes in found.values())
    assert len(set.union(*found.values())) == 4


def test_an_engine_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    spec = ChildSpec(tmp_path, env={"TRITON_INTERPRET": "1"})
    with pytest.raises(InfraError, match="SGLANG_KERNEL"):
        Live(spec, PROBLEM, LiveOptions("sglang", routes=1, graphs=False))


WHOLE = """
import json, sys
from tuner.child.session import Session
from tuner.compile.facts import captured
from tuner.problem import Problem

def hashes(call):
    with captured() as compiled:
        call()
    return {(name, built.hash) for name, built in compiled}

problem = Problem("fused_experts", 8, 256, 256, 2, "fp8_w8a8", (128, 128)).as_dict()
target = {"backend": "cuda", "arch": "90", "warp": 32, "features": ["pdl", "wgmma"],
          "limits": [232448, 52428800, 132, 4224]}
session = Session()
adapter = session._simulated("moegate", problem, target)
batch = session._compile_batch(64)
late = {}
for up, down in json.loads(sys.argv[1]):
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
    more = {"GROUP_SIZE_M": 1, "USE_TMA": True}
    pair = {p: {**dict(zip(names, tile)), **more} for p, tile in (("up", up), ("down", down))}
    calls = [*adapter.helpers(0), *adapter.helpers(up[0])]
    calls += [lambda p=p: batch.launch(p, pair[p], 0) for p in pair]
    ahead = set().union(*map(hashes, calls))
    late[str(up)] = sorted(name for name, _ in hashes(lambda: batch.whole(pair, 0)) - ahead)
print(json.dumps(late))
"""


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_the_finals_launch(tmp_path: Path) -> None:
    """In block-FP8 a down projection's binary depends on how the scales lie that the up projection hands over."""
    pairs = [((16, 64, 128, 4, 2), (16, 128, 128, 4, 2)), ((64, 128, 128, 4, 2), (64, 128, 128, 4, 3)),
             ((128, 256, 128, 8, 3), (128, 128, 128, 8, 3))]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", WHOLE, json.dumps(pairs)], capture_output=True, text=True, timeout=240,
        env=ChildSpec(tmp_path, env={"TRITON_CACHE_DIR": str(tmp_path / "cache")}).environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    late = json.loads(done.stdout.splitlines()[-1])
    assert len(late) == len(pairs)
    assert not any(late.values()), late
