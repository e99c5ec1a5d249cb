"""Examine this machine: a table of probes, each with what its absence costs and how to mend it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moegate.errors import MoegateError
from moegate.extras import install

__all__ = ["PROBES", "Finding", "Probe", "examine"]

_DEADLINE_S = 60.0
# Asked in a child as measuring children are started: clean environment, safe path.
_CHILD = """
import json
out = {}
for name in ("torch", "triton", "ray", "safetensors", "uvicorn", "aiohttp"):
    try:
        module = __import__(name)
        out[name] = str(getattr(module, "__version__", "present"))
    except Exception as error:
        out[name] = None
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Finding:
    """One piece: whether it is there, what was found, what its absence costs, and what to do."""

    name: str
    present: bool
    detail: str
    cost: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """How to look for one piece. `look` returns what was found, or raises LookupError with why there is nothing."""

    name: str
    look: Callable[[], str]
    cost: str
    fix: str


def _python() -> str:
    return f"{platform.python_version()} at {sys.executable}"


def _child_modules() -> dict[str, str | None]:
    from moegate import spawn

    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD], env=spawn.child_env(), capture_output=True, text=True,
        timeout=_DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return {}


_modules: dict[str, str | None] = {}


def _module(*names: str) -> Callable[[], str]:
    def look() -> str:
        if not _modules:
            _modules.update(_child_modules())
        missing = [name for name in names if not _modules.get(name)]
        if missing:
            raise LookupError(f"{', '.join(missing)} cannot be imported")
        return ", ".join(f"{name} {_modules[name]}" for name in names)

    return look


def _docker() -> str:
    from orchestrator import daemon

    client = daemon.connect(timeout_s=10.0)
    try:
        facts = daemon.facts(client)
        return f"engine {facts.version} (API {facts.api}) at {facts.address}"
    finally:
        client.close()


def _chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    raise LookupError("no Chromium on the path")


def _git() -> str:
    found = shutil.which("git")
    if found is None:
        raise LookupError("git is not on the path")
    return found


def _gpus(kind: str) -> Callable[[], str]:
    def look() -> str:
        from orchestrator.pools import discovery

        found = discovery.devices(kind, 1)
        if not found:
            raise LookupError("none found")
        return ", ".join(f"{device.identity.name} ({device.identity.identity})" for device in found)

    return look


def _cpus() -> str:
    usable = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{usable} CPUs, {memory:.0f} GiB of memory"


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 1:
        raise LookupError(f"{free:.2f} GiB free here")
    return f"{free:.0f} GiB free here"


def _writable() -> str:
    if not os.access(Path.cwd(), os.W_OK):
        raise LookupError(f"{Path.cwd()} is not writable")
    return str(Path.cwd())


def _withdrawn() -> str:
    from orchestrator.pools import withdrawn

    found = withdrawn.marks()
    if found:
        raise LookupError("; ".join(str(mark) for mark in found.values()))
    return "no device of this host is withdrawn"


_INSTALL = "make venv"

PROBES: tuple[Probe, ...] = (
    Probe("python", _python, "", ""),
    Probe("cpu", _cpus, "", ""),
    Probe("folder", _writable, "no run directory can be made here", "change to a writable folder, or use --out"),
    Probe("disk", _disk, "a run may stop halfway; it can be resumed", "free some space, or prune old runs"),
    Probe("git", _git, "`git:` arms and `source` arms cannot be read", "apt-get install git"),
    Probe("torch", _module("torch"), "kernel-test, kernel-bench, tune and serve cells fail on this host", _INSTALL),
    Probe("triton", _module("triton"), "only torch and reference backends run, nothing is tuned", _INSTALL),
    Probe("server", _module("uvicorn", "aiohttp", "safetensors"), "serve and accuracy cells fail on this host",
          install("serve")),
    Probe("ray", _module("ray"), "pools with `ray: local` are down; write `ray: none` for plain slots",
          install("ray")),
    Probe("docker", _docker, "`isolation: auto` takes processes, `isolation: docker` is exit 3",
          "install and start Docker Engine"),
    Probe("nvidia", _gpus("cuda"), "cuda pools are down", "install the NVIDIA driver"),
    Probe("amd", _gpus("rocm"), "rocm pools are down", "install ROCm"),
    Probe("intel", _gpus("xpu"), "xpu pools are down",
          f"install the Intel GPU driver and {install('xpu')}"),
    Probe("devices", _withdrawn, "pools do without these devices",
          "have a look at the device, then orchestrator doctor --release ID"),
    Probe("chromium", _chromium, "the report's browser tests are skipped", "apt-get install chromium chromium-driver"),
)  # fmt: skip
"""Everything that is looked for, in the order in which it is printed."""


def examine() -> list[Finding]:
    """Run all probes; a probe that fails in any way is a finding, never an error."""
    _modules.clear()
    return [_examine(probe) for probe in PROBES]


def _examine(probe: Probe) -> Finding:
    try:
        return Finding(probe.name, True, probe.look())
    except (LookupError, MoegateError, OSError, subprocess.SubprocessError, ValueError) as error:
        own = re.search(r"\(fix: (.+)\)$", str(error), re.DOTALL)  # knows better what is wrong than the table does
        return Finding(probe.name, False, str(error), probe.cost, own[1] if own else probe.fix)
