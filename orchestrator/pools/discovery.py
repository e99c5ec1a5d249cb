"""Which devices this host has, by asking the vendors' own tools and files; never by importing torch.

Every probe has a deadline, because a sick driver hangs rather than fails. A probe that cannot answer says why and what
to do: a silent "0 devices" would send every cell to the wrong place.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from moegate.devices import physical_identity
from moegate.errors import PoolError
from moegate.extras import install
from moegate.records import DeviceIdentity
from orchestrator.pools import dri
from orchestrator.pools.slots import HostDevice

__all__ = ["PROBES", "cpu_sets", "devices", "machine_identity", "mask"]

_DEADLINE_S = 20.0
_CUDA_MASK = "CUDA_VISIBLE_DEVICES"


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
    env = {name: value for name, value in os.environ.items() if name != _OTHER_ORDER}
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=_DEADLINE_S, check=False, stdin=subprocess.DEVNULL
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
    return tuple(_unmasked(out))


def _unmasked(found: list[HostDevice]) -> list[HostDevice]:
    """Those that CUDA_VISIBLE_DEVICES of this process leaves: whoever set it may have given the others to somebody."""
    mask = os.environ.get(_CUDA_MASK)
    if mask is None:
        return found
    kept: list[HostDevice] = []
    for word in filter(None, map(str.strip, mask.split(","))):
        if word == "-1":  # CUDA hides this and whatever follows
            break
        mine = [d for d in found if word == str(d.ordinal) or (len(word) > 4 and d.identity.identity.startswith(word))]
        if len(mine) != 1:
            fix = (
                "of a whole device, MIG slices are no devices of a pool" if word.startswith("MIG") else "that it lists"
            )
            raise PoolError(
                f"{_CUDA_MASK} names {word!r:.80}, which nvidia-smi does not list (fix: an index or UUID {fix})"
            )
        if word.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len(_kinds(found)) > 1:
            raise PoolError(
                f"{_CUDA_MASK}={mask:.80} counts the fastest first, nvidia-smi by address, and this host has "
                f"{', '.join(sorted(_kinds(found)))} (fix: name UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID)"
            )
        kept += mine
    if not kept:
        raise PoolError(f"no NVIDIA devices: {_CUDA_MASK} hides all of them (fix: unset {_CUDA_MASK})")
    return [device for device in found if device in kept]


def mask(kind: str) -> str | None:
    """The mask in this process's environment that devices of `kind` were counted under, as `NAME=VALUE`."""
    told = os.environ.get(_CUDA_MASK) if kind == "cuda" else None
    return None if told is None else f"{_CUDA_MASK}={told:.80}"


def _kinds(found: list[HostDevice]) -> set[str]:
    return {device.identity.name for device in found}


def _rocm(slots: int) -> tuple[HostDevice, ...]:
    del slots
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
    for index, name in enumerate(sorted((n for n in cards if re.fullmatch(r"card\d+", n)), key=lambda n: int(n[4:]))):
        card = cards[name]
        address = str(card.get("PCI Bus", "")).lower()
        identity = physical_identity("rocm", None, address)
        if identity is None:
            raise PoolError(f"no AMD devices: rocm-smi names the PCI bus {address[:40]!r}")
        series = str(card.get("Card Series") or card.get("Card series") or "AMD GPU").strip()
        arch = str(card.get("GFX Version") or "")
        out.append(
            HostDevice(DeviceIdentity("rocm", series, identity, arch), index, ("/dev/kfd", *dri.nodes(identity)))
        )
    return tuple(out)


_XPU_PROGRAM = """
import json, dpctl
rows = []
for device in dpctl.get_devices(backend="level_zero", device_type="gpu"):
    rows.append([device.name, str(device.driver_version), int(getattr(device, "global_mem_size", 0) or 0)])
print(json.dumps(rows))
"""
_INTEL = "0x8086"
# Launches never have it, so what counts the devices must not either: it puts integrated devices in another place.
_OTHER_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_XPU_MASKS = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")


def _xpu(slots: int) -> tuple[HostDevice, ...]:
    """Intel devices: counted and named by dpctl in a process of its own (it initialises the driver), found by sysfs.

    dpctl knows no PCI address. Level Zero orders its devices by address, integrated ones last, so the n-th device is
    the n-th card, provided that both count the same; the launch proves it from inside (its UUID holds the address).
    """
    del slots
    masked = [name for name in _XPU_MASKS if os.environ.get(name)]
    if masked:
        raise PoolError(f"no Intel devices: {masked[0]} hides some of them from this process (fix: unset {masked[0]})")
    text = _ask(
        [sys.executable, "-P", "-c", _XPU_PROGRAM],
        "no Intel devices",
        f"{install('xpu')} (dpctl is what counts Intel devices), and check the groups of /dev/dri",
    )
    rows = json.loads(text)
    cards = _in_driver_order(len(rows))
    found = [
        HostDevice(DeviceIdentity("xpu", str(name), card.address, "", str(driver), int(memory)), number, card.nodes)
        for number, ((name, driver, memory), card) in enumerate(zip(rows, cards, strict=True))
    ]
    return tuple(sorted(found, key=lambda device: device.identity.identity))


def _in_driver_order(count: int) -> list[dri.Card]:
    """The cards that the driver counts, in its order. Raises PoolError where the two cannot be matched."""
    cards = dri.cards(_INTEL)
    ordered = sorted(cards, key=lambda card: (card.integrated, card.address))
    for candidates in (ordered, [card for card in ordered if not card.integrated]):
        if len(candidates) == count:
            return candidates
    shut = next((node for card in cards if (node := card.shut())), None)
    fix = f"this user cannot open {shut}: usermod -aG render,video USER" if shut else "infra/host/health.sh names them"
    raise PoolError(f"the driver counts {count} Intel devices, /dev/dri holds {len(cards)} cards (fix: {fix})")


PROBES: Mapping[str, Callable[[int], tuple[HostDevice, ...]]] = {"cpu": _cpu, "cuda": _cuda, "rocm": _rocm, "xpu": _xpu}
"""How each device kind is counted."""
