"""Sending a workload: closed loop or open loop, with a watch over the client itself.

A client that lags measures itself. So one task does nothing but sleep and note how late it wakes: what delays it
delays every time stamp.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from serving import apikey
from serving.load import served
from serving.load.client import Event, Target, send
from serving.load.workload import Call, Workload

__all__ = ["Run", "drive"]

_BEAT_S = 0.01


@dataclass(frozen=True)
class Run:
    """What one load did.

    `began` and `ended` (seconds, the client's clock) bound the measured window: the first request sent to the last
    content received. `lags` are delays of the client's own event loop in seconds, `cpu_s` its processor time.
    `served` is what the server itself measured of these very requests, where it tells (`serving.load.served`).
    """

    events: tuple[Event, ...]
    began: float
    ended: float
    lags: tuple[float, ...]
    cpu_s: float
    warm_up: tuple[Event, ...] = ()
    served: Mapping[str, float] | None = None

    @property
    def duration(self) -> float:
        """Seconds of the measured window."""
        return self.ended - self.began


async def drive(target: Target, workload: Workload, warm_up: int, between: Callable[[], None] | None = None) -> Run:
    """Warm the server up with at least `warm_up` parallel requests, call `between`, then send the workload."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=apikey.headers()) as session:
        warmed: list[Event] = []
        fresh = await served.read(session, target.base_url)
        for burst in workload.warm_up(warm_up):
            events = _events(burst)
            await asyncio.gather(*(send(session, target, *pair) for pair in zip(burst, events, strict=True)))
            warmed += events
        before = await served.settled(session, target.base_url, fresh, len(warmed)) if fresh else {}
        if between is not None:
            await asyncio.to_thread(between)
        calls = workload.calls
        events = _events(calls)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection in the middle would be one long lag
        lags: list[float] = []
        beat = asyncio.ensure_future(_beat(lags))
        cpu, began = time.process_time(), time.perf_counter()
        try:
            if workload.rate is None:
                await _closed(session, target, calls, events, workload.concurrency or 1)
            else:
                await _open(session, target, calls, events, began)
            cpu = time.process_time() - cpu
        finally:
            gc.enable()
            gc.unfreeze()
            beat.cancel()
        after = await served.settled(session, target.base_url, before, len(calls)) if before else {}
    ends = [event.arrivals[-1] for event in events if event.arrivals]
    began = min((event.sent for event in events if event.sent), default=began)
    ended = max(ends, default=time.perf_counter())
    told = served.means(before, after, sum(event.ok for event in events))
    return Run(tuple(events), began, ended, tuple(lags), cpu, tuple(warmed), told)


def _events(calls: Sequence[Call]) -> list[Event]:
    return [Event(index, call.output, len(call.prompt)) for index, call in enumerate(calls)]


async def _closed(
    session: aiohttp.ClientSession, target: Target, calls: Sequence[Call], events: Sequence[Event], concurrency: int
) -> None:
    """Keep `concurrency` requests in flight; each lane takes the next request as soon as its last one ended."""
    work = iter(zip(calls, events, strict=True))

    async def lane() -> None:
        for call, event in work:
            await send(session, target, call, event)

    await asyncio.gather(*(lane() for _ in range(min(concurrency, len(calls)))))


async def _open(
    session: aiohttp.ClientSession, target: Target, calls: Sequence[Call], events: Sequence[Event], began: float
) -> None:
    """Send at absolute times, whatever the server does; how late each one was is in its event."""
    running: list[asyncio.Task[None]] = []
    for call, event in zip(calls, events, strict=True):
        event.scheduled = began + (call.at or 0.0)
        delay = event.scheduled - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        running.append(asyncio.create_task(send(session, target, call, event)))
    await asyncio.gather(*running)


async def _beat(lags: list[float]) -> None:
    while True:
        planned = time.perf_counter() + _BEAT_S
        await asyncio.sleep(_BEAT_S)
        lags.append(max(0.0, time.perf_counter() - planned))
