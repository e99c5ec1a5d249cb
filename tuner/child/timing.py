"""Timing on whatever device this process has: graph replays with events, or single calls where there are no graphs."""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tuner.playoff import Round
from xkernels.device import Device, Graph

__all__ = ["Timer", "cold_copies", "poisoned"]

_KEPT_GRAPHS = 512
_SHORTEST_US, _MOST_TIMES = 160.0, 8
_MAX_COPIES = 32


def cold_copies(weight_bytes: int, l2_bytes: int) -> int:
    """Sets of weights to rotate through so that a call finds none of its own in the last-level cache."""
    if l2_bytes <= 0 or weight_bytes <= 0:
        return 1
    return max(1, min(_MAX_COPIES, -(-2 * l2_bytes // weight_bytes)))


@contextmanager
def poisoned() -> Iterator[None]:
    """Within: `torch.empty` gives NaN, so that an output element that a kernel does not write shows."""
    # This spelling, unlike torch.use_deterministic_algorithms, does not import a compiler first.
    before, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(before)


class Timer:
    """Times a work item over several routings; `call(route)` launches it once.

    With graphs, one sample is a replay of all routings divided by their number; the graphs of the last items are kept,
    so that a later rung only replays. Without, one sample is one call. `spent` adds up seconds by what they went to.
    """

    def __init__(self, device: Device, graphs: bool) -> None:
        self.device, self.graphs = device, graphs
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._kept: OrderedDict[str, tuple[Graph, int]] = OrderedDict()

    def forget(self) -> None:
        """Drop all kept graphs (with the inputs that they point into)."""
        self._kept.clear()

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Count the time within."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[on] += time.perf_counter() - began

    def sample(
        self, name: str, call: Callable[[int], object], routes: int, reps: int, abort_us: float | None
    ) -> list[float]:
        """Microseconds per call, `reps` samples; only one where the first is above `abort_us`."""
        with self.spending("capture"):
            work = self._replayable(name, call, routes)
        samples: list[float] = []
        with self.spending("replay"):
            for rep in range(reps):
                samples.append(work(rep))
                if abort_us is not None and samples[0] > abort_us:
                    break
        return samples

    def rounds(self, calls: Mapping[str, Callable[[int], object]], routes: int) -> Round:
        """What times items by their place, round by round; all of them are captured first."""
        for call in calls.values():
            call(0)  # loads the kernels, which a graph capture must not
        self.device.synchronize()
        works = [self._replayable(name, call, routes) for name, call in calls.items()]
        turns = itertools.count()

        def once(places: Sequence[int]) -> list[float]:
            turn = next(turns)
            return [works[place](turn) for place in places]

        return once

    def _replayable(self, name: str, call: Callable[[int], object], routes: int) -> Callable[[int], float]:
        kept = self._kept.get(name)
        if kept is None and self.graphs:
            kept = self._captured(call, routes)
            if kept is not None:
                self._kept[name] = kept
                while len(self._kept) > _KEPT_GRAPHS:
                    self._kept.popitem(last=False)
        if kept is not None:
            replay, times = kept[0].replay, kept[1]

            def replays() -> None:
                for _ in range(times):
                    replay()

            return lambda rep: self._elapsed(replays) / (routes * times)
        return lambda rep: self._elapsed(lambda: call(rep % routes))

    def _captured(self, call: Callable[[int], object], routes: int) -> tuple[Graph, int] | None:
        """A graph of all routings, and how often a sample replays it to be long enough for a clock of 0.5 us."""

        def every() -> None:
            for route in range(routes):
                call(route)

        graph = self.device.capture(every, warmups=0, small=True)
        if graph is None:
            return None
        took = self._elapsed(graph.replay)
        return graph, max(1, min(_MOST_TIMES, math.ceil(_SHORTEST_US / max(took, 1.0))))

    def _elapsed(self, work: Callable[[], object]) -> float:
        begin, end = self.device.event(), self.device.event()
        begin.record()
        work()
        end.record()
        return begin.elapsed_ms(end) * 1e3
