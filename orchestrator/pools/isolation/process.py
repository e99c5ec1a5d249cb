"""Process isolation: a fresh process on this host, with a clean environment and one device in sight."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from moegate import spawn
from moegate.masking import looks_secret
from orchestrator.pools.isolation import PYTHON, RUN_MARK, LaunchResult, LaunchSpec, OnStart, preflight
from orchestrator.pools.slots import Slot

__all__ = ["LAUNCH_MARK", "ProcessIsolation", "environment", "spoken", "start_time", "visible_device"]

LAUNCH_MARK = "MOEGATE_LAUNCH"
_GRACE_S = 5.0
_TICK_S = 0.2


class _Cancelled(Exception):
    """Raised inside the wait for a child to leave it."""


def visible_device(slot: Slot) -> dict[str, str]:
    """The variables that show a child its one device and no other, by vendor.

    Set in the environment that the child is executed with, before any driver is loaded; inside, its ordinal is 0.
    """
    device = slot.device
    masks: Mapping[str, dict[str, str]] = {
        "cpu": {},
        "cuda": {"CUDA_VISIBLE_DEVICES": device.identity.identity, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        # HIP's mask alone: with ROCR's as well the second one would count what the first has left.
        "rocm": {"HIP_VISIBLE_DEVICES": str(device.ordinal)},
        "xpu": {"ZE_AFFINITY_MASK": str(device.ordinal), "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
    }
    return dict(masks[device.identity.kind])


def environment(spec: LaunchSpec) -> dict[str, str]:
    """What a launch's process gets besides the minimal environment; what we decide comes last."""
    threads = str(max(len(spec.slot.cpus), 1))
    env = dict(spec.env)
    env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default changes with Triton's version
    env |= visible_device(spec.slot)
    if spec.interpret:
        env["TRITON_INTERPRET"] = "1"
    env[RUN_MARK] = spec.run
    env[LAUNCH_MARK] = f"{spec.run}/{spec.cell}/{spec.attempt}/{spec.number}"
    return env


# What a person need not repeat: our marks, and the thread counts that follow OMP_NUM_THREADS where they are not set.
_UNSPOKEN = frozenset({RUN_MARK, LAUNCH_MARK, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"})


def spoken(argv: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command that does the same by hand: `env NAME=VALUE ... argv`, with what we set for it and no secret."""
    told = (f"{name}={value}" for name, value in sorted(env.items()) if name not in _UNSPOKEN)
    kept = [text for text in told if not looks_secret(*text.split("=", 1))]
    return ("env", *kept, *argv) if kept else argv


class ProcessIsolation:
    """Runs launches as child processes that die with the orchestrator."""

    name = "process"

    @property
    def detail(self) -> dict[str, str]:
        """The interpreter; nothing else separates a process from this host."""
        return {"python": sys.version.split()[0]}

    def run(self, spec: LaunchSpec, *, on_start: OnStart, cancel: threading.Event) -> LaunchResult:
        """Run one launch to its end, deadline or `cancel`."""
        argv = tuple(str(spec.python or sys.executable) if part == PYTHON else part for part in spec.argv)
        reason = preflight.unreadable(spec.reads)
        if reason is not None:
            return LaunchResult(None, infra=reason, command=argv)
        env = environment(spec)
        killed = _oom_kills()

        def tick() -> None:
            if cancel.is_set():
                raise _Cancelled

        try:
            child = spawn.start(
                argv,
                cwd=spec.workdir,
                env=spawn.child_env(env),
                stdout=spec.stdout,
                stderr=spec.stderr,
                timeout_s=spec.timeout_s,
                cpus=spec.slot.cpus or None,
                max_log_bytes=spec.max_log_bytes,
            )
        except OSError as error:
            return LaunchResult(None, infra=f"{argv[0]} cannot be started: {error.strerror}", command=spoken(argv, env))
        on_start("process", f"{child.pid}:{start_time(child.pid)}")
        cancelled = False
        try:
            done = child.wait(tick, _TICK_S)
        except _Cancelled:
            cancelled = True
            done = child.stop(_GRACE_S)
        _end_marked(LAUNCH_MARK, env[LAUNCH_MARK])
        died = done.signal is not None or done.returncode not in (0, 1, 2, 3)
        return LaunchResult(
            returncode=done.returncode if done.signal is None else None,
            signal=done.signal if not done.timed_out else None,
            timed_out=done.timed_out,
            oom=died and not done.timed_out and not cancelled and _oom_kills() > killed,
            cancelled=cancelled,
            truncated=done.truncated,
            wall_s=done.wall_s,
            command=spoken(argv, env),
        )

    def reap(self, run: str) -> int:
        """Kill every process that carries this run's mark in its environment, wherever it went."""
        return _end_marked(RUN_MARK, run)


def start_time(pid: int) -> int:
    """The start time of a process in clock ticks since boot, 0 where it is gone; with the pid it names one process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _end_marked(name: str, value: str) -> int:
    """Kill all processes whose environment holds name=value; again until none is found, because they may be forking."""
    wanted = f"{name}={value}".encode()
    ended = 0
    for _ in range(50):
        found = [pid for pid in _pids() if pid != os.getpid() and wanted in _environment_of(pid)]
        for pid in found:
            try:
                os.kill(pid, 9)
                ended += 1
            except (ProcessLookupError, PermissionError):
                continue
        if not found:
            break
    return ended


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only, and often


def _environment_of(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:  # noqa: PTH123
            return stream.read(1 << 20).split(b"\0")
    except OSError:
        return []


def _oom_kills() -> int:
    try:
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
