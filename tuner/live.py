"""The live runner: compiles ahead, prunes, measures in a disposable child, and survives what a config does to it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moegate.errors import InfraError
from tuner.ahead import CompilePool
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


class Live:
    """Answers requests from the device. `hello` and `ready` are what the child said of itself and of the kernel."""

    def __init__(self, spec: ChildSpec, problem: Problem, options: LiveOptions,
                 on_strike: Callable[[Strike], None] = lambda strike: None) -> None:  # fmt: skip
        self.spec, self.problem, self.options = spec, problem, options
        self._on_strike = on_strike
        self.strikes: Counter[tuple[Projection, Config]] = Counter()
        self.compiled_late = 0
        self.environment = ""
        self.worker = Worker(spec, "measure", [("setup", options.setup(problem))])
        # The compile children import while the measuring child looks at its device.
        self.pool = CompilePool(spec, options.engine, problem, options.workers) if options.workers else None
        try:
            self.hello, self.ready = self._introduce()
        except BaseException:
            self.close()
            raise
        if self.pool is not None:
            if self.hello["target"] is None:
                self.pool.close()
                self.pool = None
            else:
                self.pool.aim(self.hello["target"])

    def _introduce(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the first measuring child; what it says of its device and of the kernel."""
        probe = Worker(self.spec, "measure-first")
        answers = []
        try:
            for verb, args in (("hello", {}), ("setup", self.options.setup(self.problem))):
                answer = probe.ask(verb, self.options.first_deadline_s, **args)
                if "error" in answer:
                    raise InfraError(
                        f"the measuring child cannot {verb}: {answer['reason']} (logs: {self.spec.folder})"
                    )
                answers.append(answer)
        except WorkerLost as lost:
            raise InfraError(f"the measuring child did not start: {lost.reason} (logs: {self.spec.folder})") from None
        except BaseException:
            probe.kill()
            raise
        self.worker.adopt(probe)
        return answers[0], answers[1]

    def prepare(self, units: Iterable[Unit]) -> None:
        """Start compiling what will be asked for soon."""
        if self.pool is not None:
            self.pool.prepare((unit.projection, unit.config) for unit in units)

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answer requests in order."""
        if self.pool is not None:
            self.pool.prepare(((r.unit.projection, r.unit.config) for r in requests), urgent=True)
        return [self._one(request) for request in requests]

    def block(self, projection: Projection, config: Config) -> None:
        """Block a config from the start (it did harm in an earlier run)."""
        self.strikes[projection, config] = _STRIKES

    def close(self) -> None:
        """End all children."""
        self.worker.stop()
        if self.pool is not None:
            self.pool.close()

    def _one(self, request: Request) -> Outcome:
        unit = request.unit
        at = (unit.projection, unit.config)
        if self.strikes[at] >= _STRIKES:
            return Outcome(unit, request.rung, error="blocklisted", reason="took the measuring process down twice")
        if self.pool is not None:
            compiled = self.pool.wait(at)
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
        try:
            self.worker.start(self.options.first_deadline_s)
            answer = self.worker.ask(
                "measure", self.options.deadline_s, size=unit.batch_size, projection=unit.projection,
                config=unit.config.as_dict(), reps=request.reps, abort_us=request.abort_us,
            )  # fmt: skip
        except WorkerLost as lost:
            return Outcome(unit, request.rung, error=lost.kind, reason=lost.reason)
        if "error" in answer:
            kind: ErrorClass = answer["error"] if answer["error"] in ERRORS else "exception"
            return Outcome(unit, request.rung, error=kind, reason=str(answer["reason"]))
        self.compiled_late = max(self.compiled_late, int(answer.get("compiled", 0)))
        if int(answer.get("rss", 0)) > _RECYCLE_RSS:
            self.worker.stop()
        return Outcome(unit, request.rung, tuple(round(float(value), 3) for value in answer["samples_us"]))


def pool_size() -> int:
    """Compile processes for this machine: all its cores but one, for the measuring child and the parent mostly wait."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
