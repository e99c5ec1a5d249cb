"""A slot: one device of a pool that one attempt holds at a time."""

from __future__ import annotations

from dataclasses import dataclass

from moegate.records import DeviceIdentity

__all__ = ["HostDevice", "Slot"]


@dataclass(frozen=True)
class HostDevice:
    """One device as this host has it.

    `ordinal` is the vendor's own number (what a visibility mask takes), `nodes` are the device files that a container
    needs for this one device (`/dev/dri/renderD128`, ...). Neither is stable across boots; `identity` is.
    """

    identity: DeviceIdentity
    ordinal: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A pool's place for one attempt: a device, and the CPUs that belong to it (disjoint between slots)."""

    pool: str
    index: int
    device: HostDevice
    cpus: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`pool/index`, as the journal and the report show it."""
        return f"{self.pool}/{self.index}"
