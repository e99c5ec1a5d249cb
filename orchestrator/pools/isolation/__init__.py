"""Where a launch runs: a fresh process on this host or a fresh container, behind one small protocol.

A launch reads and writes the same absolute paths under every isolation (a container mounts them where they are), so
that a command line can be copied from a report and means the same thing everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from moegate.records import ImageSpec
from orchestrator.pools.slots import Slot

__all__ = ["PYTHON", "RUN_MARK", "Isolation", "LaunchResult", "LaunchSpec", "OnStart"]

PYTHON = "{python}"
"""Stands for the interpreter in `LaunchSpec.argv`; every isolation puts its own in its place."""

RUN_MARK = "MOEGATE_RUN"
"""Environment variable (and, for containers, label) with the run's id: by it leftovers are found and ended."""

OnStart = Callable[[str, str], None]
"""Called once with the kind (`process`, `container`) and the id (`pid:start`, container id) of what was started."""


@dataclass(frozen=True)
class LaunchSpec:
    """One launch, whatever it runs in.

    Attributes:
        run, cell, attempt, number: who it is; containers carry these as labels.
        argv: argument vector; elements equal to `PYTHON` are the interpreter.
        python: the interpreter to use for it; None is the isolation's own.
        workdir: the attempt's folder for this launch: working directory, and the only place that it may write to
            besides `writes`.
        env: variables on top of a minimal, clean environment (the arm's and the cell's; never the orchestrator's own).
        reads: absolute files and folders that the command reads (model, configs); read-only in a container.
        writes: further absolute folders that the command writes (a tune cell's `configs/<id>`).
        stdout, stderr: log files, each cut at `max_log_bytes`.
        timeout_s: hard deadline; the whole process group or container is killed then.
        slot: the device that it may use, and its CPU set.
        image: what a container runs; ignored under `process` (its `env` is already in `env`).
        network: `none`, or `loopback` where the command serves to itself. A container has its own loopback either way.
        interpret: run Triton kernels in Triton's interpreter (a CPU slot).
        memory_bytes, pids: limits of a container.
    """

    run: str
    cell: str
    attempt: int
    number: int
    argv: tuple[str, ...]
    workdir: Path
    stdout: Path
    stderr: Path
    timeout_s: float
    slot: Slot
    env: dict[str, str] = field(default_factory=dict)
    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    image: ImageSpec | None = None
    python: Path | None = None
    network: Literal["none", "loopback"] = "none"
    interpret: bool = False
    memory_bytes: int | None = None
    pids: int = 1024
    max_log_bytes: int = 8 << 20


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended. `infra` says why the launch could not be carried out or believed, and is retried.

    `returncode` is the exit status where the command exited, `signal` the signal that killed it. `oom` is true where
    the kernel or a memory limit ended it, `cancelled` where we did. `command` is what was really executed,
    with the variables that were set for it, as a person would type it.
    """

    returncode: int | None
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False
    cancelled: bool = False
    truncated: bool = False
    wall_s: float = 0.0
    infra: str | None = None
    command: tuple[str, ...] = ()
    isolation: str = "process"


class Isolation(Protocol):
    """A way to run a launch. One object serves a whole run and is called from several threads.

    `name` is `process` or `docker`; `detail` identifies what it runs on (daemon id, image digest) for keys and records.
    """

    name: str

    @property
    def detail(self) -> dict[str, str]:
        """What belongs into a cell's key and environment: image id, daemon id and version; empty for processes."""
        ...

    def run(self, spec: LaunchSpec, *, on_start: OnStart, cancel: threading.Event) -> LaunchResult:
        """Run one launch to its end, deadline or `cancel`; never raises for what the command does.

        Raises:
            ImageError, PoolError: only where no launch of this kind can work.
        """
        ...

    def reap(self, run: str) -> int:
        """End everything that an earlier orchestrator of this run left behind; return how many things that were."""
        ...
