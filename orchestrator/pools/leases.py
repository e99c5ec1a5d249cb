"""Leases: which slot of a pool is free, and the host-wide locks that keep two orchestrators off one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from moegate import devices as known_devices
from moegate.errors import PoolError
from moegate.locks import FileLock, Held, device_lock, file_stem, spoken
from moegate.records import PoolSpec
from orchestrator.pools import discovery, withdrawn
from orchestrator.pools.slots import HostDevice, Slot
from orchestrator.pools.waiting import WaitingRooms

__all__ = ["Allocator", "Lease", "Pool", "open_pool"]

WORTH_SAYING_S = 10.0
"""Ray takes a second or two to grant what is free: only a longer wait is worth a line."""

_TURNS = "the two take turns, launch by launch; to have it alone, end the other run: orchestrator cancel RUNDIR"
_WITHOUT_RAY = "`ray: none` in the pool leaves Ray out"
_RELEASE = "after a look at it: orchestrator doctor --release"


class Allocator(Protocol):
    """Something that must agree before a slot may be used (a Ray cluster); it only counts, it runs nothing."""

    def take(self, slot: Slot) -> bool:
        """Reserve this slot now; False where the cluster has it in other use."""
        ...

    def give(self, slot: Slot) -> None:
        """Return what `take` reserved."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@dataclass
class Lease:
    """One slot in use. `release` gives it back; safe to call twice."""

    slot: Slot
    _pool: Pool
    _locks: list[FileLock] = field(default_factory=list)
    _done: bool = False

    def release(self) -> None:
        """Free the slot for the next attempt, and its device for other orchestrators."""
        if not self._done:
            self._done = True
            self._pool._give(self.slot, self._locks)


class Pool:
    """The slots of one pool on this host. Thread-safe."""

    def __init__(self, spec: PoolSpec, slots: Sequence[Slot], allocator: Allocator | None, run: str = "") -> None:
        """`run`: the run directory, which others that want its devices are told."""
        self.spec = spec
        self._run = run
        self.slots = tuple(slots)
        self.holder: str | None = None
        self._allocator = allocator
        self._rooms = WaitingRooms(run)
        self._full = False
        self._free = {slot.index for slot in self.slots}
        self._lost: set[int] = set()
        self._asked: dict[int, float] = {}  # since when an allocator has not granted a slot
        self._mutex = threading.Lock()

    def take(self, device: str | None = None) -> Lease | None:
        """Take a free slot at once, or None where there is none now.

        device: only a slot on the device with this identity (the second stage of a cell).
        """
        marks = withdrawn.marks()
        with self._mutex:
            for slot in self.slots:
                if slot.index not in self._free or (device and slot.device.identity.identity != device):
                    continue
                if file_stem(slot.device.identity.identity) in marks:  # another run has just lost it
                    self._lost.add(slot.index)
                    self._free.discard(slot.index)
                    continue
                lease = self._lock(slot)
                if lease is not None:
                    self._free.discard(slot.index)
                    self._full = False
                    return lease
            self._full = device is None
            return None

    def busy(self) -> bool:
        """Whether asking for any slot would be in vain now: none is free, or none could be had a moment ago."""
        with self._mutex:
            return not self._free or self._full

    def settle(self) -> None:
        """End a round of asking: places in the queues of devices that nobody asked for in it are given up."""
        with self._mutex:
            self._rooms.settle()

    def withdraw(self, slot: Slot) -> str | None:
        """Take a slot out of use for the rest of the run: its device is lost.

        A device that fails its health probe is out of use for every run until it is released; then why is returned.
        """
        with self._mutex:
            self._lost.add(slot.index)
            self._free.discard(slot.index)
        reason = withdrawn.examine(slot.device)
        return None if reason is None else f"{withdrawn.mark(slot.device, reason)} ({_RELEASE})"

    def alive(self, device: str | None = None) -> bool:
        """Whether a slot (on that device) can still come free."""
        with self._mutex:
            return any(
                slot.index not in self._lost and (not device or slot.device.identity.identity == device)
                for slot in self.slots
            )

    def attach(self, allocator: Allocator) -> None:
        """Ask this allocator from now on."""
        self._allocator = allocator

    def close(self) -> None:
        """Leave every queue, and give back what the allocator holds."""
        self._rooms.close()
        if self._allocator is not None:
            self._allocator.close()

    def _lock(self, slot: Slot) -> Lease | None:
        locks: list[FileLock] = []
        names = _lock_names(slot)
        before = self._rooms.ask(slot.index, names)
        if before is not None:
            self.holder = f"another orchestrator is next on {_what(slot)}: {spoken(before)} ({_TURNS})"
            return None
        try:
            for name in names:
                locks.append(device_lock(name, self._run).acquire())
        except Held as error:
            # Somebody else's measurement: wait for it rather than disturb it. Taken in one order, so nobody deadlocks.
            self.holder = f"{_what(slot)} is in use by another orchestrator: {spoken(error.holder)} ({_TURNS})"
            for lock in locks:
                lock.release()
            return None
        if self._allocator is not None and not self._allocator.take(slot):
            since = self._asked.setdefault(slot.index, monotonic())
            self.holder = f"{_what(slot)} {self._asked_of()}" if monotonic() - since >= WORTH_SAYING_S else None
            for lock in locks:
                lock.release()
            return None
        self.holder = None
        self._asked.pop(slot.index, None)
        self._rooms.leave(slot.index)
        return Lease(slot, self, locks)

    def _asked_of(self) -> str:
        """Why Ray has not granted a device that no orchestrator of this host holds."""
        if self.spec.ray == "local":
            return f"is not granted yet by the Ray that this run started ({_WITHOUT_RAY})"
        address = self.spec.ray
        seen = f"ray status --address {address}"
        return f"is in use on the Ray cluster at {address}, or not granted yet (who has it: {seen}; {_WITHOUT_RAY})"

    def _give(self, slot: Slot, locks: list[FileLock]) -> None:
        if self._allocator is not None:
            self._allocator.give(slot)
        for lock in locks:
            lock.release()
        with self._mutex:
            if slot.index not in self._lost:
                self._free.add(slot.index)


def _lock_names(slot: Slot) -> list[str]:
    """One lock per physical device; on a processor one per CPU of the set, so that any two overlapping sets collide."""
    identity = slot.device.identity
    if identity.kind == "cpu":
        return [f"{identity.identity}-{number:05d}" for number in sorted(slot.cpus)]
    return [identity.identity]


def _what(slot: Slot) -> str:
    identity = slot.device.identity
    return f"{identity.name} ({identity.identity})"


def open_pool(
    spec: PoolSpec,
    allocator: Callable[[PoolSpec, Sequence[Slot]], Allocator | None],
    cpus: Sequence[tuple[int, ...]],
    run: str = "",
) -> Pool:
    """Find a pool's devices and make its slots.

    allocator: makes the pool's allocator, or None for plain slots. cpus: the CPU set of each slot. run: the run
    directory, which others that want its devices are told.

    Raises:
        PoolError: fewer devices than slots, another device than `device_name`, or the allocator cannot start.
    """
    every = discovery.devices(spec.device, spec.slots)
    marks = withdrawn.marks()
    found = [device for device in every if file_stem(device.identity.identity) not in marks]
    if spec.device_name is not None:
        wanted = known_devices.normalise(spec.device_name)
        names = {name for name, _ in known_devices.lookup_names(wanted)}
        other = [device for device in found if known_devices.normalise(device.identity.name) not in names]
        if other:
            raise PoolError(f"pool {spec.name} wants {spec.device_name}, this host has {other[0].identity.name}")
    if len(found) < spec.slots:
        out = (marks.get(file_stem(device.identity.identity)) for device in every)
        why = "".join(f"; {mark} ({_RELEASE})" for mark in out if mark)
        mask = discovery.mask(spec.device)
        why += f"; {mask} may hide others" if mask else ""
        raise PoolError(f"pool {spec.name} wants {spec.slots} devices, this host has {len(found)}{why}")
    slots = [_slot(spec, index, device, cpus) for index, device in enumerate(found[: spec.slots])]
    return Pool(spec, slots, allocator(spec, slots), run)


def _slot(spec: PoolSpec, index: int, device: HostDevice, cpus: Sequence[tuple[int, ...]]) -> Slot:
    return Slot(spec.name, index, device, cpus[index] if index < len(cpus) else ())
