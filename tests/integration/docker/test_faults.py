"""What is left when the orchestrator is killed, and what becomes of a launch whose daemon is restarted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moegate.records import ImageSpec
from orchestrator import daemon
from orchestrator.images import BuiltImage
from orchestrator.pools.isolation import LaunchResult, LaunchSpec
from orchestrator.pools.isolation.docker import DockerIsolation

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
MATRIX = """\
schema: 1
name: killed
images: {cpu: {dockerfile: dockerfiles/cpu.Dockerfile}}
pools: {cpu: {image: cpu, device: cpu, isolation: docker, ray: none, slots: 1}}
cells:
  - {kind: kernel-test, pools: [cpu], ops: [fused_experts], dtypes: [float32], timeout: 3m}
"""


def until(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def test_a_killed_orchestrator_leaves_a_container_and_resume_removes_it(
    client: Any, cpu_image: BuiltImage, tmp_path: Path
) -> None:
    matrix = ROOT / "matrices" / f".killed-{os.getpid()}.yaml"
    matrix.write_text(MATRIX)
    argv = [sys.executable, "-P", "-m", "orchestrator", "run", str(matrix), "--out", str(tmp_path / "run")]
    env = {**os.environ, "MOEGATE_LOCK_DIR": str(tmp_path / "locks")}
    here = f"moegate.owner={os.uname().nodename}:"

    def ours(pid: int) -> list[Any]:
        filters = {"label": f"{here}{pid}"}
        found: list[Any] = client.containers.list(all=True, filters=filters)
        return found

    try:
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log, stderr=log)
            (container,) = until(lambda: ours(process.pid), 120)
            process.send_signal(signal.SIGKILL)
            process.wait()
        # A container is no descendant: it outlives its orchestrator, and only its labels say whose it was.
        assert ours(process.pid)
        assert container.labels["moegate.cell"].startswith("kernel-test-")
        done = subprocess.run([*argv, "--resume"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "leftover" in done.stderr
        run = container.labels["moegate.run"]
        assert client.containers.list(all=True, filters={"label": f"moegate.run={run}"}) == []
    finally:
        matrix.unlink()


# A daemon of the test's own


def small_image(folder: Path) -> Path:
    """A root filesystem with a shell and sleep, and the libraries that they need, as a tar file."""
    root = folder / "root"
    for program in ("/bin/sh", "/bin/sleep"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
        for path in [program, *libraries]:
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
    (root / "tmp").mkdir()
    archive = folder / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    return archive


class OwnDaemon:
    """A dockerd with its own socket and folders, without networks, that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # In a network of its own: without a bridge a daemon takes the one away that another daemon of this host uses.
        argv = ["unshare", "--net", "dockerd", f"--host={self.host}"]
        argv += [f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec"]
        argv += [f"--pidfile={self.folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        until(self.answers, 120)

    def answers(self) -> bool:
        done = subprocess.run(["docker", "--host", self.host, "version"], capture_output=True, check=False)
        return done.returncode == 0

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(120)


@pytest.fixture
def own_daemon(monkeypatch: pytest.MonkeyPatch, base: str) -> Iterator[OwnDaemon]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a daemon of its own needs root and dockerd")
    folder = Path("/run") / f"moegate-test-{os.getpid()}"  # a socket's path must be short
    folder.mkdir(mode=0o700)
    own = OwnDaemon(folder)
    try:
        own.start()
        monkeypatch.setenv("DOCKER_HOST", own.host)
        yield own
        own.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("command", ["sleep 600", "trap '' TERM; while :; do sleep 1; done"], ids=["ends", "resists"])
def test_a_restarted_daemon_is_infrastructure_and_nothing_is_left(
    own_daemon: OwnDaemon, spec_for: Callable[..., LaunchSpec], tmp_path: Path, command: str
) -> None:
    client = daemon.connect()
    imported = subprocess.run(
        ["docker", "--host", own_daemon.host, "import", str(small_image(tmp_path)), "small:test"],
        capture_output=True,
        text=True,
        check=True,
    )
    isolation = DockerIsolation({"small": imported.stdout.strip()})
    assert isolation.detail["docker.id"] != ""
    spec = spec_for(("/bin/sh", "-c", command), image=ImageSpec(name="small"), timeout_s=300.0)
    started = threading.Event()
    results: list[LaunchResult] = []

    def work() -> None:
        results.append(isolation.run(spec, on_start=lambda kind, ident: started.set(), cancel=threading.Event()))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(120)
    until(lambda: client.containers.list(), 120)
    own_daemon.stop()
    own_daemon.start()
    thread.join(150)
    client.close()
    (result,) = results
    assert result.infra is not None
    assert "daemon" in result.infra
    assert not result.oom
    assert isolation.reap(spec.run) == 0
