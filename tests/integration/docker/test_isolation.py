"""One launch in one real container: what it may do, and how each way of ending is told apart."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker.errors import NotFound

from moegate.errors import ImageError
from moegate.records import DeviceIdentity, ImageSpec
from orchestrator import daemon
from orchestrator.pools.isolation import LaunchResult, LaunchSpec, caches, preflight
from orchestrator.pools.isolation.docker import DockerIsolation
from orchestrator.pools.slots import HostDevice, Slot

pytestmark = pytest.mark.docker

Launch = Callable[..., LaunchResult]
Make = Callable[..., LaunchSpec]


def left(client: Any, run: str) -> list[str]:
    return [c.id for c in client.containers.list(all=True, filters={"label": f"moegate.run={run}"})]


def once_running(client: Any, act: Callable[[str], object]) -> Callable[[str, str], None]:
    """An `on_start` that does something to the launch's container from outside, once it runs: that may take seconds."""

    def on_start(kind: str, ident: str) -> None:
        assert kind == "container"

        def work() -> None:
            end = time.monotonic() + 50
            with contextlib.suppress(NotFound):  # it was over before: the test fails by what it asserts
                while time.monotonic() < end and not client.api.inspect_container(ident)["State"]["Running"]:
                    time.sleep(0.05)
                act(ident)

        threading.Thread(target=work).start()

    return on_start


def test_a_command_runs_writes_its_folder_and_is_gone(client: Any, spec_for: Make, launch: Launch, run_id: str) -> None:
    spec = spec_for("pwd; echo problem >&2; echo made >result.txt")
    result = launch(spec)
    assert (result.returncode, result.signal, result.infra, result.timed_out) == (0, None, None, False)
    assert spec.stdout.read_text() == f"{spec.workdir}\n"
    assert spec.stderr.read_text() == "problem\n"
    assert (spec.workdir / "result.txt").read_text() == "made\n"
    assert result.isolation == "docker"
    assert result.command[:2] == ("docker", "run")
    assert left(client, run_id) == []


def test_exit_status_is_the_commands(spec_for: Make, launch: Launch) -> None:
    assert launch(spec_for("exit 2")).returncode == 2


CONFINED = """
set -u
[ "$(id -u)" != 0 ] || echo 'is root'
touch /etc/changed 2>/dev/null && echo 'root filesystem is writable'
grep -q '^CapEff:[[:space:]]*0000000000000000$' /proc/self/status || echo 'has capabilities'
grep -q '^NoNewPrivs:[[:space:]]*1$' /proc/self/status || echo 'may gain privileges'
[ "$(ls /sys/class/net)" = lo ] || echo "has a network: $(ls /sys/class/net)"
touch /tmp/fine || echo 'no temporary folder'
touch "$1/changed" 2>/dev/null && echo 'an input is writable'
cat "$1/input" || echo 'the input is not readable'
grep '^Cpus_allowed_list' /proc/self/status
cat /proc/1/comm
hostname
"""


def test_a_container_is_confined(spec_for: Make, launch: Launch, tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    reads.mkdir()
    (reads / "input").write_text("given\n")
    spec = spec_for(("/bin/sh", "-c", CONFINED, "sh", str(reads)), reads=(reads,))
    result = launch(spec)
    assert result.infra is None
    lines = spec.stdout.read_text().splitlines()
    # Nothing before the input was complained of; the rest shows the CPU set, an init process and the host's name.
    assert lines == ["given", "Cpus_allowed_list:\t0", "docker-init", os.uname().nodename[:63]]


def test_processes_are_limited(spec_for: Make, launch: Launch) -> None:
    spec = spec_for("for i in $(seq 40); do sleep 5 & done; wait", pids=16)
    result = launch(spec)
    assert result.returncode not in (0, None)
    assert "fork" in spec.stderr.read_text().lower()


def test_memory_over_the_limit_is_oom(spec_for: Make, launch: Launch) -> None:
    result = launch(spec_for(("python3", "-c", "x = bytearray(400 << 20); print(len(x))"), memory_bytes=64 << 20))
    assert result.oom
    assert result.infra is None


def test_a_segfault_is_signal_11(spec_for: Make, launch: Launch) -> None:
    result = launch(spec_for(("python3", "-c", "import os; os.kill(os.getpid(), 11)")))
    assert (result.signal, result.returncode, result.oom) == (11, None, False)


def test_a_hang_that_ignores_sigterm_ends_at_the_deadline(
    client: Any, spec_for: Make, launch: Launch, run_id: str
) -> None:
    began = time.monotonic()
    result = launch(spec_for("trap '' TERM INT; while :; do sleep 1; done", timeout_s=2.0))
    assert result.timed_out
    assert result.infra is None
    assert time.monotonic() - began < 60
    assert left(client, run_id) == []


def test_a_paused_container_ends_at_the_deadline(client: Any, base: str, spec_for: Make, run_id: str) -> None:
    on_start = once_running(client, client.api.pause)
    result = DockerIsolation({"base": base}).run(
        spec_for("sleep 600", timeout_s=6.0), on_start=on_start, cancel=threading.Event()
    )
    assert result.timed_out
    assert left(client, run_id) == []


def test_a_removed_container_is_infrastructure(client: Any, base: str, spec_for: Make) -> None:
    on_start = once_running(client, lambda ident: client.api.remove_container(ident, force=True))
    result = DockerIsolation({"base": base}).run(spec_for("sleep 600"), on_start=on_start, cancel=threading.Event())
    assert result.infra is not None
    assert "removed" in result.infra


def test_a_container_killed_by_somebody_else_is_a_signal(client: Any, base: str, spec_for: Make) -> None:
    on_start = once_running(client, client.api.kill)
    result = DockerIsolation({"base": base}).run(spec_for("sleep 600"), on_start=on_start, cancel=threading.Event())
    assert (result.signal, result.oom, result.timed_out) == (9, False, False)


def test_cancel_ends_it_politely(client: Any, base: str, spec_for: Make, run_id: str) -> None:
    cancel = threading.Event()
    spec = spec_for("trap 'echo bye; exit 0' TERM; while :; do sleep 0.1; done")
    on_start = once_running(client, lambda ident: cancel.set())
    result = DockerIsolation({"base": base}).run(spec, on_start=on_start, cancel=cancel)
    assert result.cancelled
    assert not result.timed_out
    assert spec.stdout.read_text() == "bye\n"
    assert left(client, run_id) == []


def test_a_huge_log_is_cut_in_the_file_and_in_the_daemon(spec_for: Make, launch: Launch) -> None:
    spec = spec_for("head -c 24000000 /dev/zero", max_log_bytes=1 << 20, timeout_s=120.0)
    result = launch(spec)
    assert result.returncode == 0
    assert result.truncated
    assert (1 << 20) < spec.stdout.stat().st_size < (1 << 20) + 200


def test_launches_append_to_one_log(spec_for: Make, launch: Launch) -> None:
    spec = spec_for("echo said >&2")
    spec.stderr.write_text("== launch 0\n")
    launch(spec)
    launch(spec_for("echo again >&2"))
    assert spec.stderr.read_text() == "== launch 0\nsaid\nagain\n"


def test_a_full_temporary_folder_is_the_commands_failure(spec_for: Make, launch: Launch) -> None:
    spec = spec_for("head -c 2000000000 /dev/zero >/tmp/big", memory_bytes=3 << 30, timeout_s=120.0)
    result = launch(spec)
    assert result.returncode == 1
    assert "No space left" in spec.stderr.read_text()


def test_a_missing_program_device_or_image_is_infrastructure(base: str, spec_for: Make, launch: Launch) -> None:
    result = launch(spec_for(("/no/such/program",)))
    assert result.infra is not None
    assert "cannot be executed" in result.infra
    vendor = HostDevice(DeviceIdentity("rocm", "none here", "0000:03:00.0"), nodes=("/dev/dri/renderD250",))
    result = launch(spec_for("true", slot=Slot("rocm", 0, vendor)))
    assert result.infra is not None
    assert "/dev/" in result.infra
    with pytest.raises(ImageError, match="other"):
        launch(spec_for("true", image=ImageSpec(name="other")))


def test_orphans_are_reaped_by_label_and_others_left_alone(client: Any, base: str, run_id: str) -> None:
    def orphan(run: str) -> str:
        labels = {"moegate.run": run}
        container = client.containers.run(base, ["sleep", "300"], detach=True, network_mode="none", labels=labels)
        return str(container.id)

    mine, other = orphan(run_id), orphan(run_id + "-other")
    try:
        isolation = DockerIsolation({"base": base})
        assert isolation.reap(run_id) == 1
        assert left(client, run_id) == []
        assert left(client, run_id + "-other") == [other]
        assert isolation.reap(run_id) == 0
        assert mine != other
    finally:
        client.api.remove_container(other, force=True)


def test_compiled_code_is_kept_in_a_labelled_volume(client: Any, spec_for: Make, launch: Launch, base: str) -> None:
    spec = spec_for('echo "$TRITON_CACHE_DIR"; mount | grep -c " /cache "')
    launch(spec)
    assert spec.stdout.read_text() == "/cache/triton\n1\n"
    name = f"moegate-cache-{base.removeprefix('sha256:')[:12]}-cpu"
    assert client.volumes.get(name).attrs["Labels"] == {"moegate.cache": "1"}


def test_detail_names_daemon_and_image(base: str) -> None:
    detail = DockerIsolation({"base": base}).detail
    assert detail["image.base.id"] == base
    assert detail["docker.id"]
    assert float(detail["docker.api"]) >= 1.24


def test_a_missing_input_or_a_full_daemon_starts_no_container(
    client: Any, spec_for: Make, launch: Launch, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = launch(spec_for("true", reads=(Path("/srv/models/not-here"),)))
    assert "/srv/models/not-here is not on this host" in (result.infra or "")
    monkeypatch.setattr(preflight.no_room, "__defaults__", (1 << 60,))
    result = launch(spec_for("true"))
    assert "are free in" in (result.infra or "")
    assert left(client, run_id) == []


@pytest.mark.parametrize("cdi", [False, True])
def test_a_gpu_that_the_daemon_cannot_give_is_infrastructure_with_its_words(
    spec_for: Make, launch: Launch, monkeypatch: pytest.MonkeyPatch, cdi: bool
) -> None:
    """No GPU and no NVIDIA runtime here: what is tested is that the daemon understands both ways of asking."""
    known = frozenset({"nvidia.com/gpu=GPU-6f1c"}) if cdi else frozenset()
    real = daemon.facts
    monkeypatch.setattr(daemon, "facts", lambda client: replace(real(client), cdi=known))
    card = HostDevice(DeviceIdentity("cuda", "NVIDIA H200", "GPU-6f1c"))
    result = launch(spec_for("true", slot=Slot("h200", 0, card)))
    assert "could not select device driver" in (result.infra or ""), result
    assert ('"cdi"' in (result.infra or "")) is cdi


def test_a_cache_over_its_cap_is_removed_unless_it_is_in_use(client: Any, base: str, run_id: str) -> None:
    label = {"moegate.cache": "1"}
    free, used, other = (f"moegate-cache-test-{run_id}-{name}" for name in ("free", "used", "other"))
    holder = None
    try:
        for name in (free, used, other):
            client.volumes.create(name, labels=label if name != other else {})
            options = {"network_mode": "none", "volumes": {name: {"bind": "/cache", "mode": "rw"}}}
            client.containers.run(
                base, ["dd", "if=/dev/zero", "of=/cache/x", "bs=1M", "count=2"], remove=True, **options
            )
        holder = client.containers.run(base, ["sleep", "60"], detach=True, network_mode="none",
                                       volumes={used: {"bind": "/cache", "mode": "rw"}})  # fmt: skip
        assert free not in caches.trim(client, 4 << 20)
        gone = caches.trim(client, 1 << 20)
        assert free in gone
        assert not {used, other} & set(gone)
    finally:
        if holder is not None:
            holder.remove(force=True)
        for name in (free, used, other):
            with contextlib.suppress(NotFound):
                client.volumes.get(name).remove()
