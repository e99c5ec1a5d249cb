"""Compile ahead: a pool of child processes that fill the cache which the measuring child reads, off the device."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import statistics
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.config import Config
from tuner.problem import Problem, Projection
from tuner.strategies.base import ErrorClass

__all__ = ["CompilePool", "Compiled"]

_START_S = 180.0
_LONGEST_S, _SHORTEST_S = 60.0, 15.0
_SIZE = 64
"""Batch size that is compiled for: kernels take the number of tokens as a run-time integer, so one serves all."""

Job = tuple[Projection, Config]


@dataclass(frozen=True)
class Compiled:
    """What one compile came to: the compiler's facts, or an error."""

    facts: dict[str, Any] | None
    error: ErrorClass | None = None
    reason: str = ""


class CompilePool:
    """`workers` children, each driven by a thread; jobs that a caller waits for go before those prepared early."""

    def __init__(self, spec: ChildSpec, engine: str, problem: Problem, workers: int) -> None:
        self._kernel = {"engine": engine, "problem": problem.as_dict()}
        self._target: dict[str, Any] | None = None
        self._spec = spec
        self._queue: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._state: dict[Job, Compiled | None] = {}
        self._running: set[Job] = set()
        self._times: list[float] = []
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """Compiles that were done."""
        return len(self._times)

    @property
    def seconds(self) -> float:
        """Processor seconds spent compiling."""
        return sum(self._times)

    @property
    def slowest(self) -> float:
        """Seconds of the slowest compile that succeeded."""
        return max(self._times, default=0.0)

    def binaries(self) -> int:
        """Distinct binaries that came out."""
        done = [c.facts["hash"] for c in self._state.values() if c is not None and c.facts is not None]
        return len(set(done))

    def aim(self, target: dict[str, Any]) -> None:
        """Say what to compile for; the children have started meanwhile. Jobs come after this."""
        self._target = target

    def prepare(self, jobs: Iterable[Job], urgent: bool = False) -> None:
        """Queue jobs that were not queued before; urgent ones overtake."""
        assert self._target is not None
        with self._changed:
            for job in jobs:
                if job not in self._state:
                    self._state[job] = None
                elif not urgent or self._state[job] is not None:
                    continue
                heapq.heappush(self._queue, (0 if urgent else 1, next(self._order), job))
            self._changed.notify_all()

    def wait(self, job: Job) -> Compiled:
        """The result of a job, queued now if it never was."""
        self.prepare([job], urgent=True)
        with self._changed:
            while (done := self._state[job]) is None:
                self._changed.wait(1.0)
                if self._closing:
                    return Compiled(None, "compile-failed", "the pool was closed")
        return done

    def close(self) -> None:
        """End all children; jobs that wait are dropped."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _deadline(self) -> float:
        if len(self._times) < 20:
            return _LONGEST_S
        p90 = statistics.quantiles(self._times, n=10)[-1]
        return min(_LONGEST_S, max(_SHORTEST_S, 3 * p90))

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                while self._queue:
                    job = heapq.heappop(self._queue)[2]
                    # An urgent copy of a job may be queued while the job is done or under way.
                    if self._state[job] is None and job not in self._running:
                        self._running.add(job)
                        return job
                if self._closing:
                    return None
                self._changed.wait(1.0)

    def _work(self, number: int) -> None:
        worker = Worker(self._spec, f"compile-{number}")
        try:
            with contextlib.suppress(WorkerLost):  # a child that cannot start fails every job, with its reason
                worker.ask("warm", _START_S, **self._kernel)
            while (job := self._next()) is not None:
                done = self._compile(worker, job)
                with self._changed:
                    self._state[job] = done
                    self._running.discard(job)
                    if done.facts is not None:
                        self._times.append(float(done.facts["seconds"]))
                    self._changed.notify_all()
        finally:
            worker.kill()

    def _compile(self, worker: Worker, job: Job) -> Compiled:
        projection, config = job
        lost: WorkerLost | None = None
        for _ in range(2):  # one retry in a fresh process: a loss may be the machine's and not the config's
            first = worker.pid is None
            try:
                answer = worker.ask(
                    "compile", _START_S if first else self._deadline(), **self._kernel, target=self._target, size=_SIZE,
                    projection=projection, config=config.as_dict(),
                )  # fmt: skip
            except WorkerLost as error:
                lost = error
                continue
            if "error" in answer:
                kind: ErrorClass = "over-shared" if answer["error"] == "over-shared" else "compile-failed"
                return Compiled(None, kind, str(answer["reason"]))
            return Compiled(answer["facts"])
        assert lost is not None
        return Compiled(None, "compile-timeout" if lost.kind == "timeout" else "compile-crashed", lost.reason)
