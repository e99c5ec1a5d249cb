"""The process that Ray runs in, with a stand-in for Ray: what it answers, how it dies, and that nothing is left."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moegate.errors import PoolError
from moegate.records import DeviceIdentity, PoolSpec
from orchestrator.pools import ray_apart
from orchestrator.pools.ray_apart import _END_S, RayService, Share
from orchestrator.pools.slots import HostDevice, Slot

RAY = """
import os, subprocess, sys
def is_initialized(): return True
def shutdown(): open(os.environ["FAKE_RAY_FOLDER"] + "/shutdown", "w").close()
def cluster_resources(): return {"moegate_cpu": 2.0}
def init(**options):
    print("chatter on standard output")
    # As Ray's workers do: a group of its own, out of reach of a signal to its starter's.
    worker = subprocess.Popen(["sleep", "600"], process_group=0, stdout=2)
    with open(os.environ["FAKE_RAY_FOLDER"] + "/worker", "w") as stream: stream.write(str(worker.pid))
"""
GROUPS = """
import os, sys, time
class Group:
    def wait(self, timeout_seconds): return True
def placement_group(bundles, strategy):
    mode = os.environ["FAKE_RAY"]
    if mode == "dies":
        print("the GCS has gone", file=sys.stderr, flush=True)
        os._exit(1)
    if mode == "hangs": time.sleep(600)
    if mode == "refuses": raise RuntimeError("no room")
    return Group()
def placement_group_table(group): return {"state": "CREATED"}
def remove_placement_group(group): pass
"""
SLOT = Slot("cpu", 0, HostDevice(DeviceIdentity("cpu", "c", "cpu:host")))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RayService]]:
    package = tmp_path / "site" / "ray"
    (package / "util").mkdir(parents=True)
    (package / "__init__.py").write_text(RAY)
    (package / "util" / "__init__.py").touch()
    (package / "util" / "placement_group.py").write_text(GROUPS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAKE_RAY_FOLDER", str(tmp_path))
    short = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(short))
    started: list[RayService] = []

    def start(mode: str) -> RayService:
        monkeypatch.setenv("FAKE_RAY", mode)
        started.append(RayService([PoolSpec("cpu", "cpu", slots=2)]))
        return started[-1]

    yield start
    for one in started:
        one.stop()
    assert not alive(int((tmp_path / "worker").read_text()))
    short.rmdir()  # nothing is left in it


def test_it_answers_and_ends_in_order(
    service: Callable[[str], RayService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    ray = service("grants")
    share = Share(ray, "cpu")
    assert share.take(SLOT)
    share.give(SLOT)
    share.close()
    assert "RAY_AUTH_TOKEN" not in os.environ, "only Ray's own process knows it"
    ray.stop()
    assert (tmp_path / "shutdown").is_file()
    with pytest.raises(PoolError, match="Ray has ended"):
        share.take(SLOT)


def test_a_ray_that_dies_is_an_error_with_its_last_words(service: Callable[[str], RayService]) -> None:
    share = Share(service("dies"), "cpu")
    for _ in range(2):
        with pytest.raises(PoolError, match="Ray has ended: the GCS has gone"):
            share.take(SLOT)
    share.give(SLOT)  # it holds nothing any more
    share.close()


def test_a_ray_that_hangs_is_not_waited_for(service: Callable[[str], RayService]) -> None:
    ray = service("hangs")
    began = time.monotonic()
    with pytest.raises(PoolError, match=r"did not answer within 0\.3 s"):
        ray.ask("take", 0.3, pool="cpu", slot=0)
    ray.stop()
    assert time.monotonic() - began < _END_S, "an orderly end is not waited for"


def test_what_ray_raises_is_an_error_and_the_next_question_is_answered(service: Callable[[str], RayService]) -> None:
    share = Share(service("refuses"), "cpu")
    for _ in range(2):
        with pytest.raises(PoolError, match="Ray: RuntimeError: no room"):
            share.take(SLOT)


def test_fewer_slots_than_asked_for_end_it_at_once(service: Callable[[str], RayService], tmp_path: Path) -> None:
    service("grants")
    with pytest.raises(PoolError, match="wants 5 slots"):
        RayService([PoolSpec("cpu", "cpu", slots=5)])
    assert not alive(int((tmp_path / "worker").read_text()))


@pytest.mark.parametrize(
    ("parent", "suits"),
    [("/tmp", True), ("/tmp/" + "x" * 17, True), ("/tmp/" + "x" * 18, False), ("/tmp/\u00e9", False)],
)
def test_a_folder_whose_path_no_socket_can_have_is_not_used(
    parent: str, suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", parent)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix, dir: f"{dir}/{prefix}12345678")
    made = ray_apart._new_folder()
    assert made.startswith(f"{parent}/moegate-ray-" if suits else "/tmp/moegate-ray-")
    assert len(f"{made}/session_2026-01-01_00-00-00_123456_4194304/sockets/plasma_store") <= 107


def test_no_room_for_its_files_is_an_error_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(PoolError, match="there is no room for Ray's files: No such file or directory"):
        RayService([PoolSpec("cpu", "cpu")])
