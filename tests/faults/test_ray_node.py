"""A Ray cluster of two local nodes, one of which is killed under a run: no result is lost, none counts twice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from moegate import journal
from orchestrator.bundle import read_run
from serving.ports import free_port
from tests.standin.environment import number

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = number("MOEGATE_FAULT_ROUNDS", 20, least=1) > 20
MODEL = Path(__file__).parents[1] / "standin" / "model"
DRIVER = Path(__file__).parents[1] / "integration" / "run" / "driver.py"
MATRIX = """\
schema: 1
name: small
pools: {{cpu: {{device: cpu, ray: '{address}', isolation: process}}}}
models: {{tiny: {{config: model, dtype: float32}}}}
arms: {{one: {{configs: none, env: {{FAKE_SLEEP: '0.3'}}}}, two: {{configs: none, env: {{A: b}}}}}}
defaults: {{pools: [cpu], models: [tiny], timeout: 60s}}
cells:
  - {{kind: kernel-test, dtypes: [float32, float16, bfloat16]}}
  - {{kind: kernel-bench, batch_sizes: [2], moe_runner_backend: [auto, triton], graph: [eager, full]}}
compare: {{baseline: one, candidate: two, screen: 2, confirm: 2, futility: none}}
"""


class Cluster:
    """Two nodes on this host; each is a raylet of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, *options: str) -> set[int]:
        """Start a node and return the pids of its raylet."""
        before = self.raylets()
        argv = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"),
            *("--node-ip-address=127.0.0.1", "--disable-usage-stats", '--resources={"moegate_cpu": 1}', *options),
        ]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=180, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.raylets() - before

    def processes(self) -> dict[int, str]:
        """All processes of this cluster, by their command lines."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                line = (path / "cmdline").read_bytes().decode(errors="replace") if path.name.isdigit() else ""
            except OSError:
                continue
            if str(self.folder) in line or self.address in line:
                found[int(path.name)] = line
        return found

    def raylets(self) -> set[int]:
        """The raylets among them."""
        return {pid for pid, line in self.processes().items() if "raylet/raylet" in line.split("\0")[0]}

    def stop(self) -> None:
        """End all of it."""
        for _ in range(20):
            left = set(self.processes()) - {os.getpid()}
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if not left:
                return
            time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    folder = Path("/tmp") / f"moegate-ray-test-{os.getpid()}"  # a socket's path must be short
    folder.mkdir()
    made = Cluster(folder)
    port = made.address.rpartition(":")[2]
    try:
        made.start("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        yield made
    finally:
        made.stop()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def wait_for_launches(process: subprocess.Popen[str], path: Path, count: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if (path / "journal").is_file() and (path / "journal").read_bytes().count(b'"kind":"launch"') >= count:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0])


@pytest.mark.parametrize("lost", ["the other node", "this node"] if LONG else ["this node"])
def test_a_lost_node_costs_no_result(cluster: Cluster, tmp_path: Path, lost: str) -> None:
    (tmp_path / "pyproject.toml").touch()
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "matrix.yaml").write_text(MATRIX.format(address=cluster.address))
    mine, out = cluster.raylets(), tmp_path / "out"
    other = cluster.start(f"--address={cluster.address}") if lost == "the other node" else set()
    env = {**cluster.env, "MOEGATE_LOCK_DIR": str(tmp_path / "locks"), "RAY_TMPDIR": str(cluster.folder)}
    argv = [sys.executable, "-P", str(DRIVER), str(tmp_path), str(out)]

    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*argv, *more], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    process = start()
    wait_for_launches(process, out, 4)
    for pid in other or mine:
        os.kill(pid, signal.SIGKILL)
    text, _ = process.communicate(timeout=240)
    if process.returncode:
        # Ray may end a driver whose raylet is gone, or we give up. On a new node the run goes on where it was.
        assert lost == "this node"
        cluster.start(f"--address={cluster.address}")
        text, _ = (process := start("--resume")).communicate(timeout=240)
    assert process.returncode == 0, text
    assert {outcome.state for outcome in read_run(out).outcomes} == {"PASSED"}
    entries = journal.read(out / "journal")
    keys = {(e.data["cell"], e.data["attempt"]): e.data["key"] for e in entries if e.kind == "lease"}
    done = [e.data for e in entries if e.kind == "done" and e.data["state"] == "PASSED"]
    stages = [(data["cell"], data["stage"], keys[data["cell"], data["attempt"]]) for data in done]
    assert len(stages) == len(set(stages)), "a finished stage was executed again"
    attempts = [(e.data["cell"], e.data["attempt"]) for e in entries if e.kind == "lease"]
    assert len(attempts) == len(set(attempts))
