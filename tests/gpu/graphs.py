"""Device graphs of several calls, and their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from moe_problem import DEV


def replay_us(graph: Any, calls: int, replays: int, pause_s: float = 0.0) -> float:
    """Median device microseconds per call of a graph of `calls`; with a pause in seconds before each replay."""
    graph.replay()
    times = []
    for _ in range(replays):
        time.sleep(pause_s)
        a, b = DEV.event(), DEV.event()
        a.record()
        graph.replay()
        b.record()
        times.append(a.elapsed_ms(b) * 1e3 / calls)
    return statistics.median(times)


Timer = Callable[[Any, int, int], float]
rested_us: Timer = partial(replay_us, pause_s=0.05)
"""As `replay_us` after a rest: a series of long replays runs into the power limit, and clocks fall."""


def captured(calls: list[Callable[[], Any]]) -> Any:
    """A graph of the calls, one after the other; the first has run before, so that everything is compiled."""

    def work() -> None:
        _ = [call() for call in calls]

    calls[0]()
    return DEV.capture(work, warmups=0, small=True)


def in_turns(graphs: dict[str, Any], calls: int, rounds: int, timer: Timer = replay_us) -> dict[str, float]:
    """Median microseconds per call of graphs replayed in alternation: the device's clock is the same for all."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for r in range(rounds):
        for name in list(graphs) if r % 2 == 0 else list(graphs)[::-1]:
            times[name].append(timer(graphs[name], calls, 5))
    return {name: statistics.median(values) for name, values in times.items()}
