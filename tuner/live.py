"""The live runner: compiles ahead, prunes, measures in a disposable child, and survives what a config does to it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moegate.errors import InfraError, UsageError
from tuner.ahead import CompilePool, Job
from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.config import Config
from tuner.problem import Problem, Projection
from tuner.prune import rejected
from tuner.strategies.base import ERRORS, ErrorClass, Outcome, Request, Unit

__all__ = ["Live", "LiveOptions", "Strike"]

_RECYCLE_RSS = 12 << 30
_STRIKES = 2


@dataclass(frozen=True)
class Strike:
    """A config took the child down. The second strike blocks it at every batch size."""

    unit: Unit
    kind: str
    reason: str


@dataclass(frozen=True)
class LiveOptions:
    """How children are driven. `workers` 0 compiles in the measuring child (the interpreter compiles nothing)."""

    engine: str = "moegate"
    seed: int = 0
    routes: int = 10
    routing: str = "uniform"
    graphs: bool = True
    workers: int = 0
    deadline_s: float = 30.0
    first_deadline_s: float = 180.0

    def setup(self, problem: Problem) -> dict[str, Any]:
        """Arguments of a child's `setup`."""
        return {
            "engine": self.engine,
            "problem": problem.as_dict(),
            "seed": self.seed,
            "routes": self.routes,
            "routing": self.routing,
            "graphs": self.graphs,
        }


def _at_once() -> None:
    """Nobody else is on the device."""


class Live:
    """Answers requests from the device. `hello` is what the child said of itself, its device and the kernel.

    A request is ready as soon as its config is compiled, and whatever is ready is measured.
    """

    def __init__(
        self, spec: ChildSpec, problem: Problem, options: LiveOptions,
        on_strike: Callable[[Strike], None] = lambda strike: None, sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.spec, self.problem, self.options, self.sizes = spec, problem, options, sizes
        self._on_strike = on_strike
        self.strikes: Counter[tuple[Projection, Config]] = Counter()
        self.compiled_late: list[str] = []
        self.spent: dict[str, float] = {"waiting": 0.0, "child": 0.0}
        self.environment = ""
        self.hold: Callable[[], None] = _at_once
        """Called before each measurement: returns when nobody else uses the device."""
        self._setup: threading.Thread | None = None
        self._ready: deque[Request] = deque()
        self._held: defaultdict[Job, list[Request]] = defaultdict(list)
        self.worker = Worker(spec, "measure", [("setup", options.setup(problem))])
        # The compile children import while the measuring child looks at its device.
        self.pool = CompilePool(spec, options.engine, problem, options.workers) if options.workers else None
        try:
            self.hello = self._introduce()
        except BaseException:
            self.close()
            raise
        if self.pool is not None:
            if self.hello["target"] is None:
                self.pool.close()
                self.pool = None
            else:
                self.pool.aim(self.hello["target"])
        # Weights are made while the first configs are compiled.
        self._setup = threading.Thread(target=self._begin, daemon=True)
        self._setup.start()

    def _introduce(self) -> dict[str, Any]:
        """Start the first measuring child; what it says of its device and of the kernel."""
        probe = Worker(self.spec, "measure-first")
        kernel = {"engine": self.options.engine, "problem": self.problem.as_dict(), "sizes": list(self.sizes)}
        try:
            answer = probe.ask("hello", self.options.first_deadline_s, **kernel)
            if "error" in answer:
                kind, _, reason = str(answer["reason"]).partition(": ")
                if kind in ("UsageError", "RecordError"):  # such as a shape that the op has no kernel for
                    raise UsageError(reason)
                raise InfraError(f"the measuring child cannot start: {answer['reason']} (logs: {self.spec.folder})")
        except WorkerLost as lost:
            raise InfraError(f"the measuring child did not start: {lost.reason} (logs: {self.spec.folder})") from None
        except BaseException:
            probe.kill()
            raise
        self.worker.adopt(probe)
        return answer

    def _begin(self) -> None:
        with contextlib.suppress(WorkerLost, InfraError):  # whoever asks next starts it again and hears why
            self.worker.prime(self.options.first_deadline_s)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on and start compiling what they need."""
        for request in requests:
            job = (request.unit.projection, request.unit.config)
            if self.pool is None or self.strikes[job] >= _STRIKES or self.pool.result(job) is not None:
                self._ready.append(request)
            else:
                self._held[job].append(request)
        if self.pool is not None:
            self.pool.prepare((r.unit.projection, r.unit.config) for r in requests)

    def next(self) -> Outcome:
        """Answer the request that became ready first."""
        began = time.monotonic()
        while not self._ready:
            if not self._held or self.pool is None:
                raise LookupError("no request is open")
            ended = self.pool.poll()
            if not ended:
                raise InfraError("the compile pool was closed")
            for job in ended:
                self._ready.extend(self._held.pop(job, ()))
        self.spent["waiting"] += time.monotonic() - began
        return self._one(self._ready.popleft())

    def cancel(self) -> None:
        """Forget all requests that were not answered, and the compiles that only they wanted."""
        self._ready.clear()
        self._held.clear()
        if self.pool is not None:
            self.pool.drop()

    def block(self, projection: Projection, config: Config) -> None:
        """Block a config from the start (it did harm in an earlier run)."""
        self.strikes[projection, config] = _STRIKES

    def close(self) -> None:
        """End all children."""
        if self._setup is not None and self._setup.is_alive():
            self.worker.interrupt()
            self._setup.join()
        self.worker.kill()  # nothing is left to be said, and a device context takes its time to end by itself
        if self.pool is not None:
            self.pool.close()

    def _one(self, request: Request) -> Outcome:
        unit = request.unit
        at = (unit.projection, unit.config)
        if self.strikes[at] >= _STRIKES:
            return Outcome(unit, request.rung, error="blocklisted", reason="took the measuring process down twice")
        compiled = None if self.pool is None else self.pool.result(at)
        if compiled is not None:
            if compiled.error is not None:
                return Outcome(unit, request.rung, error=compiled.error, reason=compiled.reason)
            assert compiled.facts is not None
            verdict = rejected(compiled.facts, self.hello["limits"])
            if verdict is not None:
                return Outcome(unit, request.rung, error=verdict[0], reason=verdict[1])
        while True:
            outcome = self._try(request)
            # A loss or an illegal access is tried once more in a fresh process: another config may have caused it.
            if outcome.error not in ("timeout", "crashed", "illegal-access"):
                return outcome
            self.strikes[at] += 1
            self._on_strike(Strike(unit, outcome.error, outcome.reason))
            if self.strikes[at] >= _STRIKES:
                return outcome

    def _try(self, request: Request) -> Outcome:
        unit = request.unit
        assert self._setup is not None
        if self._setup.is_alive():
            self._setup.join()
        self.hold()
        began = time.monotonic()
        try:
            self.worker.start(self.options.first_deadline_s)
            answer = self.worker.ask(
                "measure", self.options.deadline_s, size=unit.batch_size, projection=unit.projection,
                config=unit.config.as_dict(), reps=request.reps, abort_us=request.bar(),
            )  # fmt: skip
        except WorkerLost as lost:
            return Outcome(unit, request.rung, error=lost.kind, reason=lost.reason)
        finally:
            self.spent["child"] += time.monotonic() - began
        if "error" in answer:
            kind: ErrorClass = answer["error"] if answer["error"] in ERRORS else "exception"
            return Outcome(unit, request.rung, error=kind, reason=str(answer["reason"]))
        if len(answer.get("compiled", ())) > len(self.compiled_late):
            self.compiled_late = answer["compiled"]
        self.spent.update(answer.get("spent", {}))
        if int(answer.get("rss", 0)) > _RECYCLE_RSS:
            self.worker.stop()
        return Outcome(unit, request.rung, tuple(round(float(value), 3) for value in answer["samples_us"]))


def pool_size() -> int:
    """Compile processes for this machine: all its cores but one, for the measuring child and the parent mostly wait."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
