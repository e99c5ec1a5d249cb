"""Simulated hosts for every test: card trees, a dpctl and vendors' tools, as discovery looks for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.pools import dri
from tests.standin.programs import write_program

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # `make test &` in a script ignores it, our children would inherit that, and many are ended by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SITE = Path(__file__).with_name("standin") / "site"

DPCTL = """
class Device:
    driver_version = "1.6.33578"
    global_mem_size = 25669140480
    def __init__(self, name):
        self.name = name
def get_devices(backend, device_type):
    return [Device(name) for name in {names!r}]
"""
NVIDIA_SMI = """
for n in range({count}):
    print(f"{{n}}, GPU-{{n:04x}}, NVIDIA H200, 580.95.05, 9.0, 143771")
"""
ROCM_SMI = """
import json
card = {{"Unique ID": "0x1f", "GFX Version": "gfx942", "Card Series": "AMD Instinct MI300X"}}
print(json.dumps({{f"card{{n}}": card | {{"PCI Bus": f"0000:{{n + 5:02X}}:00.0"}} for n in range({count})}}))
"""


class SimulatedHost:
    """A host whose cards exist as files: `/dev/dri` and `/sys` below `root`, tools on the path, dpctl importable."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._patch = root, monkeypatch
        monkeypatch.setenv(dri.ROOT, str(root))
        for name in ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"):
            monkeypatch.delenv(name, raising=False)

    def card(
        self, address: str, number: int, *, vendor: str = "0x8086", driver: str = "xe", links: bool = True
    ) -> None:
        """One card with its render and card node, as udev and sysfs show it."""
        folder, home = self.root / "dev" / "dri", self.root / "sys" / "bus" / "pci" / "devices" / address
        (folder / "by-path").mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        module = self.root / "sys" / "bus" / "pci" / "drivers" / driver
        module.mkdir(parents=True, exist_ok=True)
        (home / "vendor").write_text(vendor + "\n")
        (home / "device").write_text("0xe211\n")
        if not (home / "driver").exists():
            (home / "driver").symlink_to(module)
        for kind, node in (("render", f"renderD{128 + number}"), ("card", f"card{number}")):
            (folder / node).touch()
            named = self.root / "sys" / "class" / "drm" / node
            named.mkdir(parents=True, exist_ok=True)
            (named / "device").unlink(missing_ok=True)
            (named / "device").symlink_to(home)
            link = folder / "by-path" / f"pci-{address}-{kind}"
            link.unlink(missing_ok=True)
            if links:
                link.symlink_to(folder / node)

    def intel(self, cards: Mapping[str, int], name: str = "Intel(R) Arc(TM) Pro B60 Graphics") -> None:
        """Intel cards (PCI address -> node number) and a dpctl that counts them."""
        for address, number in cards.items():
            self.card(address, number)
        self.dpctl([name] * len(cards))

    def dpctl(self, names: list[str]) -> None:
        """A dpctl that names these devices."""
        folder = self.root / "python"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dpctl.py").write_text(DPCTL.format(names=names))
        self._patch.setenv("PYTHONPATH", str(folder))

    def tool(self, name: str, body: str, shell: str | None = None) -> None:
        """A stand-in for a vendor's tool, first on the path: Python, or a script for `shell`."""
        folder = write_program(self.root / "bin" / name, body, shell).parent
        if not os.environ["PATH"].startswith(f"{folder}:"):
            self._patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def standin(self, cards: Mapping[str, int]) -> Path:
        """B60 cards and a Python that has them: `tests/standin/site` before everything that this Python has."""
        for address, number in cards.items():
            self.card(address, number)
        python = self.root / "python"
        venv.create(python, with_pip=False, symlinks=True)
        site = next(python.glob("lib/python3*/site-packages"))
        shutil.copytree(SITE, site, dirs_exist_ok=True)
        real = [path for path in sys.path if path.endswith("site-packages")]
        (site / "real.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in real))
        nodes = self.root / "dev" / "dri"
        rows = [{"address": name, "node": str(nodes / f"renderD{128 + cards[name]}")} for name in sorted(cards)]
        (site / "cards.json").write_text(json.dumps(rows))
        return python / "bin" / "python"

    def nvidia(self, count: int) -> None:
        """`count` H200s."""
        self.tool("nvidia-smi", NVIDIA_SMI.format(count=count))

    def amd(self, count: int) -> None:
        """`count` MI300X, each with its nodes."""
        for number in range(count):
            self.card(f"0000:{number + 5:02x}:00.0", number, vendor="0x1002", driver="amdgpu")
        self.tool("rocm-smi", ROCM_SMI.format(count=count))


@pytest.fixture
def simulated_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedHost:
    """An empty simulated host; the test says what is in it."""
    return SimulatedHost(tmp_path / "host", monkeypatch)
