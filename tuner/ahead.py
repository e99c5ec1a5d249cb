"""Compile ahead: a pool of child processes that fill the cache which the measuring child reads, off the device."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.config import Config
from tuner.problem import Problem, Projection
from tuner.strategies.base import ErrorClass

__all__ = ["CompilePool", "Compiled"]

_START_S = 180.0
_LONGEST_S, _SHORTEST_S = 60.0, 10.0
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
    """`workers` children, each driven by a thread; jobs are done in the order in which they were prepared."""

    def __init__(self, spec: ChildSpec, engine: str, problem: Problem, workers: int) -> None:
        self._kernel = {"engine": engine, "problem": problem.as_dict()}
        self._target: dict[str, Any] | None = None
        self._queue: deque[Job] = deque()
        self._blocks: deque[int] = deque()
        self._state: dict[Job, Compiled | None] = {}
        self._finished: deque[Job] = deque()
        self._times: list[float] = []
        self._changed = threading.Condition()
        self._closing = False
        self._workers = [Worker(spec, f"compile-{number}") for number in range(workers)]
        self._threads = [threading.Thread(target=self._work, args=(w,), daemon=True) for w in self._workers]
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

    def helpers(self, blocks: Iterable[int]) -> None:
        """Compile, before anything else, what runs around the tuned kernels at these BLOCK_SIZE_M."""
        with self._changed:
            self._blocks.extend(blocks)
            self._changed.notify_all()

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Queue jobs that were not queued before."""
        assert self._target is not None
        with self._changed:
            for job in jobs:
                if job not in self._state:
                    self._state[job] = None
                    self._queue.append(job)
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget the jobs that no child has begun, so that whatever is prepared next does not wait behind them."""
        with self._changed:
            for job in self._queue:
                del self._state[job]
            self._queue.clear()

    def result(self, job: Job) -> Compiled | None:
        """The result of a job, None while it is not done."""
        return self._state.get(job)

    def poll(self) -> list[Job]:
        """Jobs that ended since the last call; waits for one where there is none. Empty only after `close`."""
        with self._changed:
            while not self._finished and not self._closing:
                self._changed.wait(1.0)
            ended = list(self._finished)
            self._finished.clear()
        return ended

    def close(self) -> None:
        """End all children; jobs that wait are dropped."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            while thread.is_alive():  # a child may be starting just now
                worker.interrupt()
                thread.join(0.1)

    def _deadline(self) -> float:
        if len(self._times) < 20:
            return _LONGEST_S
        p90 = statistics.quantiles(self._times, n=10)[-1]
        return min(_LONGEST_S, max(_SHORTEST_S, 3 * p90))

    def _next(self) -> Job | int | None:
        """A job, or a BLOCK_SIZE_M whose helpers are wanted; None at the end."""
        with self._changed:
            while not self._closing:
                if self._blocks and self._target is not None:
                    return self._blocks.popleft()
                if self._queue:
                    return self._queue.popleft()
                self._changed.wait(1.0)
        return None

    def _work(self, worker: Worker) -> None:
        try:
            with contextlib.suppress(WorkerLost):  # a child that cannot start fails every job, with its reason
                worker.ask("warm", _START_S, **self._kernel)
            while (job := self._next()) is not None:
                if isinstance(job, int):
                    with contextlib.suppress(WorkerLost):  # then the measuring child compiles them itself
                        worker.ask("helpers", _START_S, **self._kernel, target=self._target, block=job)
                    continue
                done = self._compile(worker, job)
                with self._changed:
                    self._state[job] = done
                    self._finished.append(job)
                    if done.facts is not None:
                        self._times.append(float(done.facts["seconds"]))
                    self._changed.notify_all()
        finally:
            worker.kill()

    def _compile(self, worker: Worker, job: Job) -> Compiled:
        projection, config = job
        lost: WorkerLost | None = None
        # A crash once more in a fresh process: it may be the machine's and not the config's.
        for _ in range(0 if self._closing else 2):
            first = worker.pid is None
            try:
                answer = worker.ask(
                    "compile", _START_S if first else self._deadline(), **self._kernel, target=self._target, size=_SIZE,
                    projection=projection, config=config.as_dict(),
                )  # fmt: skip
            except WorkerLost as error:
                lost = error
                if self._closing or lost.kind == "timeout":
                    break
                continue
            except Exception as error:  # nobody waits for a job for ever because a thread died
                return Compiled(None, "compile-crashed", f"{type(error).__name__}: {error}"[:300])
            if "error" in answer:
                kind: ErrorClass = "over-shared" if answer["error"] == "over-shared" else "compile-failed"
                return Compiled(None, kind, str(answer["reason"]))
            return Compiled(answer["facts"])
        if lost is None:
            return Compiled(None, "compile-crashed", "the pool was closed")
        return Compiled(None, "compile-timeout" if lost.kind == "timeout" else "compile-crashed", lost.reason)
