"""`residency: both`: the two launches of a pair are up at the same time, and their loads alternate.

Each launch is what it would be alone: its own process or container, its own environment and folder. The second starts
when the first is ready, because two engines that measure the free memory at once take each other for a leak. Then the
loads go A B B A: only one client is at work at any time. They take turns through marks in their folders
(`moegate.turns`), which reaches into a container that has no network.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moegate.records import PlannedCell
from moegate.turns import END, FOLDER, READY, ROUNDS, Marks, done, go, rounds_of
from orchestrator.pools.isolation import Isolation, LaunchResult, LaunchSpec
from orchestrator.scheduler.classify import Ending

__all__ = ["Ended", "alone", "explained", "is_resident", "run_together"]

_TICK_S = 0.01
_HINT = "residency: both keeps two servers on one device; swap needs room for one"


@dataclass(frozen=True)
class Ended:
    """How one launch ended. `place` is its place among those that ended: the first is why another was stopped."""

    result: LaunchResult
    place: int


def is_resident(cell: PlannedCell) -> bool:
    """Whether the launches of this cell's pairs are up together."""
    return cell.axes.get("residency") == "both"


def alone(spec: LaunchSpec) -> LaunchSpec:
    """The launch with logs of its own, where it cannot write itself, and with time for its partner as well."""
    stdout, stderr = (path.with_name(f"launch-{spec.number:03d}.{path.name}") for path in (spec.stdout, spec.stderr))
    return replace(spec, stdout=stdout, stderr=stderr, timeout_s=2 * spec.timeout_s)


def explained(ending: Ending, cancelled: bool) -> Ending:
    """The ending of a pair, in words that fit two launches; `cancelled`: whether the whole run was stopped."""
    if ending.state == "CANCELLED" and not cancelled:
        return Ending("FAILED", "its partner ended before it had its turns")
    short_of_memory = ending.state == "OOM" or "memory" in ending.reason
    return replace(ending, reason=f"{ending.reason} ({_HINT})") if short_of_memory else ending


def run_together(
    isolation: Isolation, specs: Sequence[LaunchSpec], cancel: threading.Event, rounds: int = ROUNDS
) -> list[Ended]:
    """Run launches that take turns, and return how each ended, in the order of `specs`.

    A launch that ends before its time stops the others; so does `cancel`. What the isolation raises is raised here.
    """
    stop = threading.Event()
    ended: list[_Launch] = []
    launches = [_Launch(isolation, spec, stop, ended) for spec in specs]
    try:
        in_order = _take_turns(launches, rounds, ended, cancel)
    except OSError:  # a launch put something else where a mark belongs
        in_order = False
    if not in_order:
        stop.set()
    while any(launch.is_alive() for launch in launches):
        if cancel.wait(_TICK_S) or any(launch.failed for launch in ended):
            stop.set()
    for launch in launches:
        launch.marks.close()
    return [_ended(launch, ended) for launch in launches]


class _Launch(threading.Thread):
    """One launch in a thread of its own; it notes itself in `ended`."""

    def __init__(self, isolation: Isolation, spec: LaunchSpec, stop: threading.Event, ended: list[_Launch]) -> None:
        super().__init__(name=f"launch-{spec.number}", daemon=True)
        self.isolation, self.spec, self.stop, self.ended = isolation, spec, stop, ended
        self.marks = Marks(spec.workdir / FOLDER)
        self.result: LaunchResult | None = None
        self.error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether its partner's result is of no use any more."""
        return self.result is None or self.result.returncode != 0

    def run(self) -> None:
        """Run it to its end."""
        try:
            self.result = self.isolation.run(self.spec, on_start=lambda kind, ident: None, cancel=self.stop)
        except BaseException as error:
            self.error = error
        self.ended.append(self)


def _take_turns(
    launches: Sequence[_Launch], rounds: int, ended: Sequence[_Launch], cancel: threading.Event
) -> bool:  # fmt: skip
    """Start all, give each its rounds, and let them end; False where one ended before that, or on `cancel`."""

    def reached(launch: _Launch, mark: str) -> bool:
        while not launch.marks.has(mark):
            if ended or cancel.wait(_TICK_S):
                return False
        return True

    for launch in launches:
        launch.start()
        if not reached(launch, READY):
            return False
    for index, number in rounds_of(range(len(launches)), rounds):
        launches[index].marks.set(go(number))
        if not reached(launches[index], done(number)):
            return False
    for launch in launches:
        launch.marks.set(END)
    return True


def _ended(launch: _Launch, ended: Sequence[_Launch]) -> Ended:
    if launch.error is not None:
        raise launch.error
    if launch.result is None:  # its partner was never ready, so it was not started
        return Ended(LaunchResult(None, cancelled=True), len(ended))
    return Ended(launch.result, ended.index(launch))
