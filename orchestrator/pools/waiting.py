"""Who is next on a device that another orchestrator holds.

A lock alone is not fair: its holder gives it back and takes it again before anybody who polls has looked. So a device
has a second lock, its waiting room, with one place: whoever wants the device must hold that first, and keeps it while
it waits. A holder that wants to go on finds the waiting room taken, and the two have the device in turn. Both locks die
with their process, so a place is never kept by a dead one.
"""

from __future__ import annotations

from collections.abc import Sequence

from moegate.locks import FileLock, Held, device_lock

__all__ = ["WaitingRooms"]

_NEXT = ".next"


class WaitingRooms:
    """The places that one pool holds in waiting rooms, by slot."""

    def __init__(self, run: str = "") -> None:
        """`run`: the run directory that the places are taken for."""
        self._run = run
        self._held: dict[int, list[FileLock]] = {}
        self._asked: set[int] = set()

    def ask(self, slot: int, names: Sequence[str]) -> str | None:
        """Take, or keep, the place for the devices of a slot. Return who has it where that is somebody else."""
        self._asked.add(slot)
        if slot in self._held:
            return None
        places: list[FileLock] = []
        try:
            for name in names:
                places.append(device_lock(name + _NEXT, self._run).acquire())
        except Held as error:
            _release(places)
            return error.holder
        self._held[slot] = places
        return None

    def leave(self, slot: int) -> None:
        """Give the place of a slot up: it has its devices, or wants them no more."""
        _release(self._held.pop(slot, []))

    def settle(self) -> None:
        """Give up every place that was not asked for since the last call: nobody may wait for who does not."""
        for slot in set(self._held) - self._asked:
            self.leave(slot)
        self._asked.clear()

    def close(self) -> None:
        """Give up everything."""
        self._asked.clear()
        self.settle()


def _release(places: list[FileLock]) -> None:
    for place in places:
        place.release()
