"""Container isolation: one launch in one fresh container with one device, and nothing else that it could touch.

Read-only root, no capabilities, no new privileges, not root, no network but its own loopback, bounded memory,
processes and logs. What became of it is judged from the daemon's inspected state only. Every container carries the
labels `moegate.run`, `moegate.cell` and `moegate.attempt`, by which leftovers of a dead orchestrator are found.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate.errors import ImageError, PoolError
from moegate.records import DeviceIdentity
from orchestrator import daemon
from orchestrator.pools.isolation import PYTHON, LaunchResult, LaunchSpec, OnStart, caches, preflight
from orchestrator.pools.isolation.flags import CACHE, MASKS, device_options
from orchestrator.pools.isolation.logs import Follower
from orchestrator.pools.isolation.process import environment
from orchestrator.pools.isolation.shell import shell_command

__all__ = ["CONTAINER_PYTHON", "DockerIsolation", "container_options"]

CONTAINER_PYTHON = "/opt/moegate/bin/python"
"""Our own environment inside every image of ours: an engine in the same image is never disturbed by it."""

CONTAINER_UID = 10001
"""Who runs in a container where the orchestrator itself is root; otherwise it is the orchestrator's own user."""

_PASSED = (
    *("image", "command", "environment", "working_dir", "user", "group_add", "hostname", "network_mode", "read_only"),
    *("tmpfs", "cap_drop", "security_opt", "pids_limit", "mem_limit", "memswap_limit", "shm_size", "devices", "init"),
    "labels",
)
_TMP_BYTES = 1 << 30
_GRACE_S = 5.0
_KILL_WAIT_S = 15.0
_DAEMON_WAIT_S = 60.0
_STOPPING_S = 2.0
_REMOVE_WAIT_S = 30.0
_POLL_S = (0.05, 0.5)
_MEMORY_SHARE = 0.8


def _user() -> tuple[int, int]:
    uid, gid = os.geteuid(), os.getegid()
    return (CONTAINER_UID, CONTAINER_UID) if uid == 0 else (uid, gid)


def _memory_limit() -> int:
    """The default memory limit: most of this host, so that a runaway launch ends before the host does."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE)


def container_options(spec: LaunchSpec, image_id: str, *, cdi: Collection[str] = ()) -> dict[str, Any]:
    """Return what the container of `spec` is created with, as plain data.

    Raises:
        OSError: a device file is not there.
    """
    device = device_options(spec.slot.device, cdi=cdi)
    env = {name: value for name, value in environment(spec).items() if name not in MASKS}
    env |= {"HOME": "/tmp", **device["environment"]}  # noqa: S108 - a path inside the container
    uid, gid = _user()
    memory = spec.memory_bytes or _memory_limit()
    mounts = [(str(path), True) for path in spec.reads]
    mounts += [(path, True) for path in device["mounts"] if Path(path).exists()]
    mounts += [(str(path), False) for path in (spec.workdir, *spec.writes)]
    return {
        "image": image_id,
        "command": [str(spec.python or CONTAINER_PYTHON) if part == PYTHON else part for part in spec.argv],
        "environment": env,
        "working_dir": str(spec.workdir),
        "user": f"{uid}:{gid}",
        "group_add": device["group_add"],
        # The measuring child names its CPU by the host's name, in a container as in a process.
        "hostname": platform.node()[:63],
        "network_mode": "none",
        "read_only": True,
        "tmpfs": {"/tmp": f"rw,nosuid,nodev,exec,size={_TMP_BYTES},mode=1777"},  # noqa: S108 - inside the container
        "mounts": dict(mounts),
        "cache": f"moegate-cache-{image_id.removeprefix('sha256:')[:12]}-{_class(spec.slot.device.identity)}",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", *device["security_opt"]],
        "pids_limit": spec.pids,
        "mem_limit": memory,
        "memswap_limit": memory,
        "cpuset_cpus": ",".join(str(cpu) for cpu in spec.slot.cpus),
        "shm_size": min(device["shm_size"], memory),
        "ulimits": device["ulimits"],
        "devices": device["devices"],
        "device_requests": device["device_requests"],
        "init": True,
        "log_bytes": spec.max_log_bytes,
        "labels": {
            f"{daemon.LABEL}.run": spec.run,
            f"{daemon.LABEL}.cell": spec.cell,
            f"{daemon.LABEL}.attempt": str(spec.attempt),
            f"{daemon.LABEL}.launch": str(spec.number),
            f"{daemon.LABEL}.owner": f"{platform.node()}:{os.getpid()}",
        },
    }


def _class(device: DeviceIdentity) -> str:
    """The device class as a volume's name may hold it: what was compiled for one model is of no use to another."""
    name = "" if device.kind == "cpu" else "-" + re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")[:60]
    return device.kind + name


@dataclass
class _Watch:
    """What was learnt while a container ran."""

    state: Mapping[str, Any]
    timed_out: bool = False
    cancelled: bool = False
    daemon_lost: bool = False
    infra: str | None = None


class DockerIsolation:
    """Runs launches in containers of one daemon.

    Args:
        images: image name of the matrix -> image id. Filled by whoever built them.
    """

    name = "docker"

    def __init__(self, images: Mapping[str, str]) -> None:
        self._images = images
        client = daemon.connect()
        try:
            self._facts = daemon.facts(client)
        finally:
            client.close()

    @property
    def detail(self) -> dict[str, str]:
        """The daemon and the images."""
        return {**self._facts.record(), **{f"image.{name}.id": image for name, image in sorted(self._images.items())}}

    def run(self, spec: LaunchSpec, *, on_start: OnStart, cancel: threading.Event) -> LaunchResult:
        """Run one launch to its end, deadline or `cancel`. See Isolation.run."""
        if spec.image is None or spec.image.name not in self._images:
            name = "none" if spec.image is None else spec.image.name
            raise ImageError(f"no image is built for this launch (asked for: {name})")
        began = time.monotonic()
        reason = preflight.unreadable(spec.reads) or preflight.no_room(self._facts.root)
        if reason is not None:
            return LaunchResult(None, infra=reason, isolation=self.name)
        try:
            options = container_options(spec, self._images[spec.image.name], cdi=self._facts.cdi)
            _hand_over(spec)
            client = daemon.connect(timeout_s=30.0)
        except (OSError, PoolError) as error:
            return LaunchResult(None, infra=f"the container cannot be prepared: {error}", isolation=self.name)
        try:
            return self._run(client, spec, options, on_start, cancel, began)
        finally:
            client.close()

    def _run(
        self,
        client: Any,
        spec: LaunchSpec,
        options: Mapping[str, Any],
        on_start: OnStart,
        cancel: threading.Event,
        began: float,
    ) -> LaunchResult:
        command = shell_command(options)
        container = ""
        try:
            container = _create(client, options)
            on_start("container", container)
            client.api.start(container)
        except Exception as error:
            # The library raises many types here (HTTP, socket, its own); all mean that nothing ran.
            _remove(client, container)
            return LaunchResult(
                None, infra=f"the container did not start: {daemon.reason(error)}", command=command, isolation=self.name
            )
        followers = [
            Follower(container, stream, path, spec.max_log_bytes)
            for stream, path in (("stdout", spec.stdout), ("stderr", spec.stderr))
        ]
        try:
            watch = _watch(client, container, began + spec.timeout_s, cancel)
            for follower in followers:
                follower.finish()
        finally:
            _remove(client, container)
        truncated = any(follower.truncated for follower in followers)
        return _result(watch, command, time.monotonic() - began, truncated)

    def reap(self, run: str) -> int:
        """Remove every container of this run, running or not, and cache volumes over their cap."""
        client = daemon.connect()
        try:
            found = client.api.containers(all=True, filters={"label": f"{daemon.LABEL}.run={run}"})
            for entry in found:
                _remove(client, entry["Id"])
            caches.trim(client)
            return len(found)
        finally:
            client.close()


def _hand_over(spec: LaunchSpec) -> None:
    """Give the folders that the launch writes to the container's user, where we are root and it is not."""
    uid, gid = _user()
    if os.geteuid() != 0:
        return
    for folder in (spec.workdir, *spec.writes):
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, uid, gid)
        for path in folder.rglob("*"):
            os.chown(path, uid, gid, follow_symlinks=False)


def _create(client: Any, options: Mapping[str, Any]) -> str:
    from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

    client.volumes.create(options["cache"], labels={f"{daemon.LABEL}.cache": "1"})
    mounts = [Mount(path, path, type="bind", read_only=ro) for path, ro in options["mounts"].items()]
    mounts.append(Mount(CACHE, options["cache"], type="volume"))
    requests = [
        DeviceRequest(
            driver=item.get("Driver", ""), device_ids=item["DeviceIDs"], capabilities=item.get("Capabilities", [])
        )
        for item in options["device_requests"]
    ]
    # The daemon's own copy of a log stays bounded, whatever is written (JSON takes up to six bytes for one).
    log_config = LogConfig(type="json-file", config={"max-size": str(4 * options["log_bytes"]), "max-file": "2"})
    container = client.containers.create(
        **{name: options[name] for name in _PASSED},
        entrypoint=[],
        cpuset_cpus=options["cpuset_cpus"] or None,
        mounts=mounts,
        device_requests=requests or None,
        ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in options["ulimits"].items()],
        log_config=log_config,
        stdin_open=False,
        tty=False,
    )
    return str(container.id)


def _remove(client: Any, container: str) -> None:
    """Remove a container if it is there; what a daemon that stays away keeps is reaped later, by its labels."""
    until = time.monotonic() + _REMOVE_WAIT_S
    while container:
        try:
            _reachable()
            client.api.remove_container(container, force=True, v=True)
        except Exception as error:
            if daemon.is_gone(error) and time.monotonic() < until:
                time.sleep(0.5)
                continue
        return


def _reachable() -> None:
    if not daemon.answers():
        raise ConnectionError("the Docker daemon does not answer")


def _state(client: Any, container: str) -> Mapping[str, Any]:
    _reachable()
    state: Mapping[str, Any] = client.api.inspect_container(container)["State"]
    return state


def _watch(client: Any, container: str, deadline: float, cancel: threading.Event) -> _Watch:
    """Poll the container's state until it has ended, is over its deadline, is cancelled or cannot be asked any more."""
    watch = _Watch({})
    pause = _POLL_S[0]
    lost_since: float | None = None
    while True:
        try:
            watch.state = _state(client, container)
            lost_since = None
        except Exception as error:
            if daemon.is_missing(error):
                watch.infra = "the container was removed while it ran"
                return watch
            if not daemon.is_gone(error):
                watch.infra = f"the daemon refused to tell the container's state: {daemon.reason(error)}"
                return watch
            watch.daemon_lost = True
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > _DAEMON_WAIT_S:
                watch.infra = f"the Docker daemon went away and did not come back: {daemon.reason(error)}"
                return watch
        status = watch.state.get("Status") if lost_since is None else None
        if status in ("removing", "dead"):
            watch.infra = "the container was removed while it ran"
        if status in ("exited", "removing", "dead"):
            _look_again(client, watch)
            return watch
        now = time.monotonic()
        if lost_since is None and (now >= deadline or cancel.is_set()):
            watch.timed_out, watch.cancelled = now >= deadline, now < deadline
            _end(client, container, watch)
            return watch
        cancel.wait(min(pause, max(deadline - now, 0.01)))
        pause = min(pause * 1.5, _POLL_S[1])


def _look_again(client: Any, watch: _Watch) -> None:
    """Tell a container that ended from one that its daemon took down with it, while that daemon still answers."""
    code = watch.state.get("ExitCode")
    if code == 128 + 15:
        watch.infra = watch.infra or "it was ended by a SIGTERM that we did not send (a daemon or host that stops)"
    elif code == 128 + 9 and not watch.state.get("OOMKilled"):
        until = time.monotonic() + _STOPPING_S
        while time.monotonic() < until and not watch.daemon_lost:
            time.sleep(0.2)
            watch.daemon_lost = not daemon.answers()


def _end(client: Any, container: str, watch: _Watch) -> None:
    """End a running container: politely when cancelled, at once at its deadline."""
    signals = [("SIGTERM", _GRACE_S), ("SIGKILL", _KILL_WAIT_S)] if watch.cancelled else [("SIGKILL", _KILL_WAIT_S)]
    for signal, wait_s in signals:
        with contextlib.suppress(Exception):  # it may have ended by itself, or the daemon is gone
            client.api.kill(container, signal)
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            try:
                watch.state = _state(client, container)
            except Exception as error:
                watch.infra = None if daemon.is_missing(error) else f"while ending it: {daemon.reason(error)}"
                return
            if not watch.state.get("Running"):
                return
            time.sleep(0.05)
    watch.infra = f"the container is still running {_KILL_WAIT_S:.0f} s after SIGKILL (a driver call that cannot end?)"


def _result(watch: _Watch, command: tuple[str, ...], wall_s: float, truncated: bool) -> LaunchResult:
    state = watch.state
    code = state.get("ExitCode") if state else None
    ended = code is not None and not watch.timed_out and watch.infra is None
    infra = watch.infra
    if infra is None and state.get("Error"):
        infra = f"the daemon reports: {state['Error']}"
    if infra is None and ended and code in (126, 127):
        infra = f"the program cannot be executed in this image ({code}); see the end of its standard error"
    if infra is None and watch.daemon_lost and code != 0 and not watch.timed_out and not watch.cancelled:
        infra = f"the Docker daemon was restarted while the container ran (it then ended with {code})"
    # 128 + n is how a shell, and the init process inside, report death by signal n.
    signal = code - 128 if ended and code is not None and 128 < code < 128 + 65 else None
    return LaunchResult(
        returncode=code if ended and signal is None else None,
        signal=signal,
        timed_out=watch.timed_out,
        oom=bool(state.get("OOMKilled")) and code != 0 and not watch.timed_out and not watch.cancelled,
        cancelled=watch.cancelled,
        truncated=truncated,
        wall_s=wall_s,
        infra=infra,
        command=command,
        isolation="docker",
    )
