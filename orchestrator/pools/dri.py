"""The graphics cards of this host as the kernel shows them: PCI address, vendor, driver, device files.

Node numbers (`renderD128`) change between boots and between containers; the PCI address does not, so it is what a card
is known by, and its nodes are looked up each time. Nothing here opens a device.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Card", "cards", "nodes"]

ROOT = "MOEGATE_HOST_ROOT"
"""Environment variable: the folder in which `/dev/dri` and `/sys` are looked up, for simulated hosts (default `/`)."""

_LINK = re.compile(r"pci-([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])-(card|render)")


@dataclass(frozen=True)
class Card:
    """One card. `nodes` are its device files, the render node first; `vendor` and `device` are PCI ids (`0x8086`)."""

    address: str
    vendor: str
    device: str
    driver: str
    nodes: tuple[str, ...]

    @property
    def integrated(self) -> bool:
        """Whether it is a part of the processor: Intel's always sits on bus 0 of domain 0."""
        return self.address.startswith("0000:00:")

    def shut(self) -> str | None:
        """The first of its device files that this user cannot open, or None."""
        return next((node for node in self.nodes if not os.access(node, os.R_OK | os.W_OK)), None)


def _root() -> Path:
    return Path(os.environ.get(ROOT) or "/")


def nodes(address: str) -> tuple[str, ...]:
    """The device files of a PCI address now: render node, then card; empty where it has none."""
    return _by_address().get(address.lower(), ())


def cards(vendor: str) -> tuple[Card, ...]:
    """The cards of one PCI vendor id that have a render node, by address (domain, bus, device, function)."""
    found = []
    for address, files in sorted(_by_address().items()):
        home = _root() / "sys" / "bus" / "pci" / "devices" / address
        if _word(home / "vendor") == vendor and any("renderD" in file for file in files):
            driver = home / "driver"
            name = driver.resolve().name if driver.exists() else ""
            found.append(Card(address, vendor, _word(home / "device"), name, files))
    return tuple(found)


def _by_address() -> dict[str, tuple[str, ...]]:
    """Address -> device files, from udev's links where there are any, else from sysfs (a container has no udev)."""
    dri, found = _root() / "dev" / "dri", dict[str, dict[str, str]]()
    for link in (dri / "by-path").glob("pci-*"):
        match = _LINK.fullmatch(link.name)
        if match and link.exists():
            found.setdefault(match[1], {})[match[2]] = str(link.resolve())
    if not found:
        for node in dri.glob("*[0-9]"):
            home = _root() / "sys" / "class" / "drm" / node.name / "device"
            if home.exists():
                kind = "render" if node.name.startswith("render") else "card"
                found.setdefault(home.resolve().name, {})[kind] = str(node)
    order = ("render", "card")
    return {address: tuple(kinds[kind] for kind in order if kind in kinds) for address, kinds in found.items()}


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
