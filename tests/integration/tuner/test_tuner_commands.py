"""The commands as a person or a scheduler starts them, on the CPU."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from moegate.configs import directory_name
from moegate.journal import read as read_journal
from moegate.records import Measurement, Provenance, read
from tuner.journaled import PURPOSE

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/models/tiny-moe"
SWEEP = ROOT / "tests/data/h200_moe_up_bf16_exhaustive.json.gz"


def _tuner(
    *words: object, env: dict[str, str] | None = None, check: bool = True, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tuner", *map(str, words)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**plain, **(env or {})}, cwd=cwd)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned")
    _tuner("tune", "--model", TINY, "--dtype", "float32", "--effort", "quick", "--batch-sizes", "1,4", "--out", out,
           "--result", out / "result.json")  # fmt: skip
    return out


@pytest.mark.slow
def test_tuning_writes_what_the_bench_then_uses(tuned: Path, tmp_path: Path) -> None:
    result = read(Measurement, tuned / "result.json")
    assert (result.kind, result.status, result.interpreter) == ("tune", "ok", True)
    assert result.work["evaluations"] > 20
    assert result.device.identity.startswith("cpu:")
    names = sorted(result.outputs)
    assert len(names) == 4
    stem = "configs/triton_3_8_0/E=8,N=64,device_name=cpu,dtype=float32"
    assert names[0].split("triton_")[0] == "configs/"
    assert any(name.endswith("_down.json") for name in names)
    folder = next((tuned / "configs").iterdir())
    assert stem.split("/")[-1] + ".json" in {path.name for path in folder.iterdir()}
    up = json.loads((folder / "E=8,N=64,device_name=cpu,dtype=float32.json").read_text())
    down = json.loads((folder / "E=8,N=64,device_name=cpu,dtype=float32_down.json").read_text())
    assert list(up) == list(down) == ["1", "4"]
    assert all(up[size]["BLOCK_SIZE_M"] == down[size]["BLOCK_SIZE_M"] for size in up)
    provenance = read(Provenance, folder / "E=8,N=64,device_name=cpu,dtype=float32.provenance.json")
    assert provenance.verified
    assert provenance.interpreter
    assert provenance.covered <= provenance.candidates
    assert provenance.kernel_hash

    _tuner("bench", "--model", TINY, "--dtype", "float32", "--batch-sizes", "1,4", "--configs", tuned,
           "--moe-runner-backend", "triton", "--out", tmp_path / "b.json")  # fmt: skip
    bench = read(Measurement, tmp_path / "b.json")
    launch = bench.launches[0]
    primary = launch.primary()
    assert primary is not None
    assert primary.metric == "kernel_time_geomean"
    assert launch.proof is not None
    assert launch.proof.resolved_backend == "triton"
    uses = {(use.projection, use.batch_size): use for use in launch.proof.configs}
    assert set(uses) == {("up", 1), ("up", 4), ("down", 1), ("down", 4)}
    assert all(use.reason == "exact" and use.calls > 0 for use in uses.values())
    assert uses["up", 4].config == up["4"]
    assert launch.proof.configs_digest
    assert bench.interpreter


@pytest.mark.slow
def test_a_second_run_measures_nothing(tuned: Path) -> None:
    before = sum(entry.kind == "outcome" for entry in read_journal(tuned / "journal", purpose=PURPOSE))
    done = _tuner("tune", "--model", TINY, "--dtype", "float32", "--effort", "quick", "--batch-sizes", "1,4", "--out",
                  tuned, "--json")  # fmt: skip
    summary = json.loads(done.stdout)
    assert summary["counts"]["measured"] == 0
    assert summary["counts"]["reused"] > 0
    assert sum(entry.kind == "outcome" for entry in read_journal(tuned / "journal", purpose=PURPOSE)) == before
    assert "about" in done.stderr  # progress has an ETA


@pytest.mark.slow
def test_auto_on_the_cpu_is_torch_and_reads_no_config(tmp_path: Path) -> None:
    _tuner("bench", "--model", TINY, "--dtype", "float32", "--batch-sizes", "1", "--configs", "none", "--out",
           tmp_path / "b.json")  # fmt: skip
    launch = read(Measurement, tmp_path / "b.json").launches[0]
    assert launch.proof is not None
    assert launch.proof.resolved_backend == "torch"
    assert launch.proof.configs == ()
    assert launch.proof.configs_root is None


@pytest.mark.slow
def test_verify_counts_what_it_checked(tmp_path: Path) -> None:
    _tuner("verify", "--ops", "fused_experts", "--dtypes", "float32,fp8_w8a8", "--out", tmp_path / "v.json")
    result = read(Measurement, tmp_path / "v.json")
    skipped = sum(case.status == "skipped" for case in result.cases)
    assert skipped > 0
    assert result.work == {"cases": len(result.cases) - skipped}
    assert result.status == "ok"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune", "--out", "x"), "either --model or --shape"),
        (("tune", "--out", "x", "--shape", "E=1"), "lacks"),
        (("tune", "--out", "x", "--model", "nowhere"), "nowhere"),
        (("tune", "--out", "x", "--model", TINY, "--effort", "heroic"), "unknown effort"),
        (("tune", "--out", "x", "--model", TINY, "--engine", "acme"), "unknown engine"),
        (("tune", "--out", "x", "--op", "block_fp8_linear", "--shape", "N=7,K=100"), "K must be a multiple of 128"),
        (
            ("tune", "--out", "x", "--op", "store_kv_cache", "--shape", "heads=1,dim=8", "--dtype", "fp8_w8a8"),
            "stored as",
        ),
        (("bench", "--model", TINY, "--configs", "nowhere"), "no folder"),
        (("bench", "--model", TINY, "--moe-runner-backend", "marlin"), "marlin"),
        (("bench", "--model", TINY, "--reps", "-1"), "--reps"),
        (("bench", "--model", TINY, "--tp", "0"), "--tp"),
        (("bench", "--model", TINY, "--seed", str(1 << 63)), "--seed"),
        (("compare", "none", "none", "--model", TINY, "--launches", "0"), "--launches"),
        (("compare", "none", "none", "--model", TINY, "--margin", "nan"), "--margin: is nan (fix: between 0 and 1"),
        (("tune", "--out", "x", "--model", TINY, "--routing", "nowhere"), "nowhere: --routing: no such folder"),
        (("compare", "none", "none", "--model", TINY, "--routing", ROOT / "docs"), "docs: holds no recorded routing"),
        (("bench", "--model", TINY, "--routing", ROOT / "docs"), "docs: holds no recorded routing"),
        (("tune", "--out", "x", "--model", TINY, "--python", "venv/none"), "venv/none: --python: no such interpreter"),
        (("verify", "--ops", "sums"), "unknown op"),
        (("replay", "--journal", "nowhere"), "nowhere: No such file"),
        (("replay", "--journal", SWEEP, "--noise", "-1"), "must be 0 or more"),
        (("tune",), "--out"),
        (("frobnicate",), "No such command"),
    ],
)
def test_mistakes_exit_2_and_say_what_is_right(words: tuple[object, ...], message: str, tmp_path: Path) -> None:
    words = tuple(tmp_path / "x" if word == "x" else word for word in words)
    done = _tuner(*words, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def _record(folder: Path, expert: int) -> None:
    folder.mkdir()
    np.save(folder / "topk_ids_layer0_idx0.npy", np.full((4, 2), expert, np.int32))


def test_paths_of_the_command_line_are_those_of_the_callers_folder(tmp_path: Path) -> None:
    """Recorded routing and an interpreter, named from where the command runs: children have another folder."""
    _record(tmp_path / "rec", 3)
    (tmp_path / "venv").symlink_to(Path(sys.executable).parents[1])
    shape = ("--shape", "E=4,N=16,H=16,topk=2", "--dtype", "float32", "--batch-sizes", "1", "--routing", "rec",
             "--python", f"venv/bin/{Path(sys.executable).name}")  # fmt: skip
    _tuner("tune", *shape, "--effort", "quick", "--out", "tuned", cwd=tmp_path)
    done = _tuner("compare", "none", "tuned/configs", *shape, "--launches", "1", "--rounds", "1", cwd=tmp_path)
    assert "inconclusive" in done.stdout
    assert "intervals hold at 0.0 %; a verdict takes 5 launches or more" in done.stdout


@pytest.mark.parametrize("taken", ["configs", f"configs/{directory_name(version('triton'))}"])
def test_a_folder_that_takes_no_files_is_named_before_anything_is_measured(taken: str, tmp_path: Path) -> None:
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("")
    done = _tuner("tune", "--model", TINY, "--dtype", "float32", "--batch-sizes", "1", "--effort", "quick", "--out",
                  tmp_path, check=False)  # fmt: skip
    fix = "--out: is no folder (fix: move what is there away, or name another place)"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"tuner: {tmp_path / taken}: {fix}")
    assert "measuring" not in done.stderr


@pytest.mark.parametrize("kind", ["journal", ".json", ".provenance.json"])
def test_a_folder_under_the_name_of_a_file_is_named_before_a_child_starts(kind: str, tmp_path: Path) -> None:
    stem = f"configs/{directory_name(version('triton'))}/E=8,N=64,device_name=cpu,dtype=float32_down"
    taken = tmp_path / (kind if kind == "journal" else stem + kind)
    taken.mkdir(parents=True)
    done = _tuner("tune", "--model", TINY, "--dtype", "float32", "--batch-sizes", "1", "--effort", "quick", "--out",
                  tmp_path, check=False)  # fmt: skip
    fix = "(fix: move what is there away, or name another place)"
    assert done.stderr == f"tuner: {taken}: --out: is a folder, not the name of a file {fix}\n"
    assert done.returncode == 2
    assert not (tmp_path / "children").exists()


def test_an_op_of_one_kernel_is_compared_by_its_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    folder.mkdir()
    name = "store_kv_cache,heads=2,dim=16,device_name=cpu,dtype=float32.json"
    (folder / name).write_text('{"1": {"num_split": 1}, "2": {"num_split": 4}}')
    done = _tuner("compare", "none", tmp_path, "--op", "store_kv_cache", "--shape", "heads=2,dim=16", "--dtype",
                  "float32", "--batch-sizes", "1,2", "--launches", "1", "--rounds", "1", "--json")  # fmt: skip
    one, two = json.loads(done.stdout)["batch_sizes"]
    assert (one["verdict"], one["a"], one["b"]) == ("same config", one["b"], {"main": {"num_split": 1}})
    assert (two["verdict"], two["b"]) == ("inconclusive", {"main": {"num_split": 4}})
    assert two["a_us"] > 0


def test_when_nothing_runs_the_message_says_why(tmp_path: Path) -> None:
    _record(tmp_path / "rec", 9)
    done = _tuner("tune", "--shape", "E=4,N=16,H=16,topk=2", "--dtype", "float32", "--batch-sizes", "1", "--effort",
                  "quick", "--routing", "rec", "--out", "tuned", cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert "names expert 9 of 4" in lines[-1]
    assert lines[0].startswith("starting: fused_experts float32, quick")
    assert "measuring up M=1" in done.stderr


def test_help_is_fast_and_shows_an_example() -> None:
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "tune" in _tuner("--help").stdout
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which others on the machine take nothing of.
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 1
    for command in ("tune", "bench", "verify", "replay", "compare", "emit"):
        assert "Example:" in _tuner(command, "--help").stdout
    code = "import sys, tuner.cli; sys.exit(','.join(sorted({'torch','triton','ray','numpy'} & set(sys.modules))) or 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_kill_at_any_point_and_go_on(tmp_path: Path) -> None:
    """Ten times kill -9 in replay: the same configs as an uninterrupted run, and nothing measured twice."""
    words = ["replay", "--journal", SWEEP, "--without", "sm_90", "--effort", "quick"]
    _tuner(*words, "--out", tmp_path / "whole")
    out, kills, seeded = tmp_path / "killed", 0, random.Random(4)
    command = [sys.executable, "-P", "-m", "tuner", *map(str, words), "--out", str(out), "--delay-ms", "10"]
    for _ in range(10):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        goal = _lines(out / "journal") + seeded.randint(1, 40)  # of 700: a late kill leaves enough for the next ones
        while child.poll() is None and _lines(out / "journal") < goal:
            time.sleep(0.002)
        time.sleep(0.02 * seeded.random())  # anywhere within an evaluation
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
    assert kills == 10
    done = _tuner(*words, "--out", out, "--json")
    assert (out / "up.json").read_text() == (tmp_path / "whole" / "up.json").read_text()
    entries = [entry.data for entry in read_journal(out / "journal", purpose=PURPOSE) if entry.kind == "outcome"]
    outcomes = [(json.dumps(d["config"], sort_keys=True), d["size"], d["projection"], d["rung"]) for d in entries]
    assert len(set(outcomes)) == len(outcomes)
    whole = sum(entry.kind == "outcome" for entry in read_journal(tmp_path / "whole" / "journal", purpose=PURPOSE))
    assert len(outcomes) == whole
    assert json.loads(done.stdout)["measured"] < whole


def test_a_replay_under_noise_is_told_beside_the_true_one() -> None:
    words = ["replay", "--journal", SWEEP, "--without", "sm_90", "--effort", "quick"]
    true, noisy = (json.loads(_tuner(*words, "--json", *more).stdout) for more in ((), ("--noise", "2")))
    assert true.pop("under_noise") is None
    found = noisy.pop("under_noise")
    assert noisy == true
    assert found["seeds"] == 2
    assert true["mean_regret"] != found["mean_regret"] < found["worst_regret"]
    assert "under noise, over 2 seeds: mean" in _tuner(*words, "--noise", 2).stdout


@pytest.mark.slow
def test_ctrl_c_keeps_everything(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    command = [sys.executable, "-P", "-m", "tuner", "tune", "--model", str(TINY), "--dtype", "float32", "--effort",
               "quick", "--batch-sizes", "1,4", "--out", str(out)]  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=plain)
    while child.poll() is None and _lines(out / "journal") < 8:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=200)
    assert child.returncode == 130
    assert "goes on" in said
    assert "Traceback" not in said
    kept = sum(entry.kind == "outcome" for entry in read_journal(out / "journal", purpose=PURPOSE))
    summary = json.loads(_tuner(*command[4:], "--json").stdout)
    assert summary["counts"]["reused"] >= kept > 0
    assert summary["complete"]
