"""Which devices this host has, by asking the vendors' own tools and files; never by importing torch.

Every probe has a deadline, because a sick driver hangs rather than fails. A probe that cannot answer says why and what
to do: a silent "0 devices" would send every cell to the wrong place.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from moegate.errors import PoolError
from moegate.records import DeviceIdentity
from orchestrator.pools.slots import HostDevice

__all__ = ["PROBES", "cpu_sets", "devices", "machine_identity"]

_DEADLINE_S = 20.0
_DRI = Path("/dev/dri")


def machine_identity() -> str:
    """The identity of this machine's processor: the same name that a measuring child gives it."""
    return f"cpu:{platform.node()}"


def devices(kind: str, slots: int) -> tuple[HostDevice, ...]:
    """The host's devices of one kind, in a stable order. A CPU is one device however many slots share it.

    Raises:
        PoolError: the probe cannot tell, with what to do.
    """
    return PROBES[kind](slots)


def cpu_sets(slots: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint sets of the CPUs that this process may use, one per slot, neighbours together.

    Raises:
        PoolError: fewer CPUs than slots.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < slots:
        raise PoolError(
            f"{slots} slots need {slots} CPUs, this host offers {len(usable)} (fix: write slots: {len(usable)})"
        )
    each, extra = divmod(len(usable), slots)
    sets, start = [], 0
    for index in range(slots):
        size = each + (1 if index < extra else 0)
        sets.append(tuple(usable[start : start + size]))
        start += size
    return tuple(sets)


def _cpu(slots: int) -> tuple[HostDevice, ...]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        name = match[1].strip() if match else name
    identity = DeviceIdentity("cpu", name, machine_identity(), "cpu")
    return tuple(HostDevice(identity, ordinal=index) for index in range(slots))


def _ask(argv: list[str], what: str, fix: str) -> str:
    """Run a vendor's tool and return what it prints. Raises PoolError where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise PoolError(f"{what}: {argv[0]} is not installed (fix: {fix})") from None
    except subprocess.TimeoutExpired:
        raise PoolError(f"{what}: {argv[0]} did not answer within {_DEADLINE_S:g} s; the driver may be stuck") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PoolError(f"{what}: {argv[0]} failed: {said[-1][:200] if said else done.returncode} (fix: {fix})")
    return done.stdout


def _cuda(slots: int) -> tuple[HostDevice, ...]:
    del slots
    fields = "index,uuid,name,driver_version,compute_cap,memory.total"
    text = _ask(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        "no NVIDIA devices",
        "install the driver, or choose another pool",
    )
    out = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 6:
            raise PoolError(f"no NVIDIA devices: nvidia-smi printed {line[:80]!r}")
        index, uuid, name, driver, capability, memory = parts
        arch = "sm_" + capability.replace(".", "")
        size = int(memory) << 20 if memory.isdigit() else 0
        out.append(HostDevice(DeviceIdentity("cuda", name, uuid, arch, driver, size), int(index)))
    return tuple(out)


def _rocm(slots: int) -> tuple[HostDevice, ...]:
    del slots
    import json

    text = _ask(
        ["rocm-smi", "--showuniqueid", "--showbus", "--showproductname", "--json"],
        "no AMD devices",
        "install ROCm's rocm-smi, or choose another pool",
    )
    try:
        cards = json.loads(text)
    except ValueError:
        raise PoolError("no AMD devices: rocm-smi did not print JSON") from None
    out = []
    for index, (_, card) in enumerate(sorted((n, c) for n, c in cards.items() if n.startswith("card"))):
        address = str(card.get("PCI Bus", "")).lower()
        identity = str(card.get("Unique ID") or address)
        name = str(card.get("Card Series") or card.get("Card series") or "AMD GPU").strip()
        arch = str(card.get("GFX Version") or "")
        out.append(HostDevice(DeviceIdentity("rocm", name, identity, arch), index, ("/dev/kfd", *_nodes(address))))
    return tuple(out)


_XPU_PROGRAM = """
import json, dpctl
rows = []
for number, device in enumerate(dpctl.get_devices(backend="level_zero", device_type="gpu")):
    rows.append([number, device.name, device.driver_version, getattr(device, "pci_address", None) or ""])
print(json.dumps(rows))
"""


def _xpu(slots: int) -> tuple[HostDevice, ...]:
    """Intel devices through dpctl, in a process of its own (it initialises the driver), ordered by PCI address."""
    del slots
    import json

    text = _ask(
        [sys.executable, "-P", "-c", _XPU_PROGRAM],
        "no Intel devices",
        "python -m pip install 'moegate[xpu]' (dpctl is what counts Intel devices), and check the groups of /dev/dri",
    )
    found = [(str(address), int(number), str(name), str(driver)) for number, name, driver, address in json.loads(text)]
    out = []
    for address, number, name, driver in sorted(found):
        identity = address.lower() or f"level_zero:{number}"
        out.append(HostDevice(DeviceIdentity("xpu", name, identity, "", driver), number, _nodes(address)))
    return tuple(out)


def _nodes(address: str) -> tuple[str, ...]:
    """The device files of a PCI address. Numbers change between boots, so they are read from `by-path` each time."""
    nodes = []
    for suffix in ("render", "card"):
        link = _DRI / "by-path" / f"pci-{address.lower()}-{suffix}"
        if address and link.exists():
            nodes.append(str(link.resolve()))
    return tuple(nodes)


PROBES: Mapping[str, Callable[[int], tuple[HostDevice, ...]]] = {"cpu": _cpu, "cuda": _cuda, "rocm": _rocm, "xpu": _xpu}
"""How each device kind is counted."""
