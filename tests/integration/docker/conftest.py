"""A real daemon, the debootstrap base and the CPU image; where one is missing: skipped for a person, failed in CI."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moegate.errors import PoolError
from moegate.records import DeviceIdentity, ImageSpec
from orchestrator import daemon
from orchestrator.images import BuiltImage, ensure, obstacle
from orchestrator.pools.isolation import LaunchResult, LaunchSpec
from orchestrator.pools.isolation.docker import DockerIsolation
from orchestrator.pools.slots import HostDevice, Slot

ROOT = Path(__file__).resolve().parents[3]
BASE = "moegate-base:bookworm"


def lacking(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    try:
        client = daemon.connect()
    except PoolError as error:
        lacking(f"{error}; as root: scripts/docker-daemon.sh")
        raise
    yield client
    client.close()


@pytest.fixture(scope="session")
def base(client: Any) -> str:
    from docker.errors import ImageNotFound

    try:
        return str(client.images.get(BASE).id)
    except ImageNotFound:
        lacking(f"the base image {BASE} is missing; as root: make base-image")
        raise


@pytest.fixture(scope="session")
def cpu_image(base: str, tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    spec = ImageSpec(name="cpu", dockerfile="dockerfiles/cpu.Dockerfile")
    reason = obstacle(spec, ROOT)
    if reason:
        lacking(reason)
    built = ensure([spec], ROOT, tmp_path_factory.mktemp("build"), version="0.1.0", timeout_s=900)["cpu"]
    assert isinstance(built, BuiltImage), built
    return built


@pytest.fixture
def run_id(client: Any) -> Iterator[str]:
    """A run id of this test alone; whatever it leaves behind is removed afterwards."""
    run = f"test-{uuid.uuid4().hex[:12]}"
    yield run
    for container in client.containers.list(all=True, filters={"label": f"moegate.run={run}"}):
        container.remove(force=True)


def slot(cpus: tuple[int, ...] = (0,)) -> Slot:
    return Slot("local", 0, HostDevice(DeviceIdentity("cpu", "test", "cpu:test")), cpus)


@pytest.fixture
def spec_for(run_id: str, tmp_path: Path) -> Callable[..., LaunchSpec]:
    """Make a launch of the base image: a shell line, or an argument vector."""

    def make(command: str | tuple[str, ...], **changes: Any) -> LaunchSpec:
        work = tmp_path / "attempt-1"
        work.mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "run": run_id,
            "cell": "cell-1",
            "attempt": 1,
            "number": 0,
            "argv": ("/bin/sh", "-c", command) if isinstance(command, str) else command,
            "workdir": work,
            "stdout": tmp_path / "stdout.log",
            "stderr": tmp_path / "stderr.log",
            "timeout_s": 60.0,
            "slot": slot(),
            "image": ImageSpec(name="base"),
            "memory_bytes": 256 << 20,
        }
        return LaunchSpec(**(values | changes))

    return make


@pytest.fixture
def launch(base: str) -> Callable[..., LaunchResult]:
    """Run a launch in the base image to its end."""

    def go(spec: LaunchSpec, cancel: threading.Event | None = None) -> LaunchResult:
        isolation = DockerIsolation({"base": base})
        return isolation.run(spec, on_start=lambda kind, ident: None, cancel=cancel or threading.Event())

    return go
