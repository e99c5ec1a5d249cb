"""Devices that failed their health probe: out of use for every run on this host until a person releases them.

A card that was lost in the middle of a run and that its vendor's tool no longer shows would fail every cell after it,
one retry at a time. The mark lies beside the device locks, outlives the run, and names the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from moegate import canonical
from moegate.errors import MoegateError, PoolError
from moegate.locks import file_stem, lock_directory, open_to_all
from moegate.paths import write_atomic
from orchestrator.pools import discovery
from orchestrator.pools.slots import HostDevice

__all__ = ["Mark", "examine", "mark", "marks", "release"]


@dataclass(frozen=True)
class Mark:
    """One withdrawn device: its identity and kind, why, and since when (UTC, for people)."""

    identity: str
    kind: str
    reason: str
    since: str

    def __str__(self) -> str:
        return f"{self.identity} is withdrawn since {self.since}: {self.reason}"


def _folder() -> Path:
    return lock_directory() / "withdrawn"


def _file(identity: str) -> Path:
    return _folder() / f"{file_stem(identity)}.json"


def marks() -> dict[str, Mark]:
    """The withdrawn devices of this host by `file_stem` of their identity, whatever became of a mark's content."""
    found: dict[str, Mark] = {}
    for path in sorted(_folder().glob("*.json")) if _folder().is_dir() else ():
        try:
            body = canonical.load_json(path)
            mark = Mark(*(str(body[name]) for name in ("identity", "kind", "reason", "since")))
            if _file(mark.identity) != path:  # it could not be released by that name
                raise KeyError(mark.identity)
        except (MoegateError, KeyError, TypeError):
            mark = Mark(path.stem, "?", f"{path} cannot be read", "?")
        found[path.stem] = mark
    return found


def examine(device: HostDevice) -> str | None:
    """The health probe: ask the vendor's tool again. Return why the device is not fit, or None."""
    identity = device.identity
    if identity.kind == "cpu":
        return None
    try:
        found = discovery.devices(identity.kind, 1)
    except PoolError as error:
        return f"its health probe failed: {error}"
    if identity.identity not in {other.identity.identity for other in found}:
        return f"its health probe failed: {len(found)} {identity.kind} devices answer, and it is not one of them"
    return None


def mark(device: HostDevice, reason: str) -> Mark:
    """Withdraw a device for every run on this host."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    made = Mark(device.identity.identity, device.identity.kind, reason, now)
    body = {"identity": made.identity, "kind": made.kind, "reason": reason, "since": now}
    open_to_all(lock_directory())
    open_to_all(_folder())
    write_atomic(_file(made.identity), canonical.dumps(body) + "\n")
    return made


def release(identity: str) -> bool:
    """Give a device back to use; False where it was not withdrawn."""
    if file_stem(identity) not in marks():
        return False
    _file(identity).unlink(missing_ok=True)
    return True
