"""A runner behind a journal: what was measured is never measured again, whatever happened to the process in between."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from moegate.journal import Journal
from tuner.config import Config
from tuner.problem import Projection
from tuner.strategies.base import ErrorClass, Outcome, Request, Runner, Unit

__all__ = ["PURPOSE", "Journaled", "error_counts", "most_frequent", "outcome_data", "outcome_of"]

PURPOSE = "tune"


def outcome_data(outcome: Outcome, environment: str) -> dict[str, Any]:
    """An outcome as journal data; `environment` is the digest of what the time depends on besides the unit."""
    return {
        "env": environment,
        "size": outcome.unit.batch_size,
        "projection": outcome.unit.projection,
        "config": outcome.unit.config.as_dict(),
        "rung": outcome.rung,
        "us": list(outcome.samples_us),
        "error": outcome.error,
        "reason": outcome.reason,
    }


def outcome_of(data: dict[str, Any]) -> Outcome:
    """Inverse of `outcome_data`."""
    unit = Unit(data["size"], data["projection"], Config.of(data["config"]))
    return Outcome(unit, data["rung"], tuple(data["us"]), data["error"], data["reason"])


class Journaled:
    """Answers from the journal where it can, else asks `inner` and writes the answer down before giving it on.

    Records of another environment (another kernel, compiler, device or routing) are left alone and not used.
    """

    def __init__(self, inner: Runner, journal: Journal, environment: str) -> None:
        self.inner, self.journal, self.environment = inner, journal, environment
        self.measured = 0
        self.reused = 0
        self._known: dict[tuple[Unit, int], Outcome] = {}
        self._answers: deque[Outcome] = deque()
        for entry in journal.of("outcome"):
            if entry.data["env"] == environment:
                outcome = outcome_of(entry.data)
                self._known[outcome.unit, outcome.rung] = outcome

    def blocked(self) -> Counter[tuple[Projection, Config]]:
        """Strikes that earlier runs recorded."""
        strikes: Counter[tuple[Projection, Config]] = Counter()
        for entry in self.journal.of("strike"):
            if entry.data["env"] == self.environment:
                strikes[entry.data["projection"], Config.of(entry.data["config"])] += 1
        return strikes

    def submit(self, requests: Sequence[Request]) -> None:
        """Pass on what the journal does not answer."""
        self._answers.extend(known for r in requests if (known := self._known.get((r.unit, r.rung))) is not None)
        self.inner.submit([r for r in requests if (r.unit, r.rung) not in self._known])

    def next(self) -> Outcome:
        """What the journal knows first; else one answer of `inner`, written down, so that a crash loses at most one."""
        if self._answers:
            self.reused += 1
            return self._answers.popleft()
        outcome = self.inner.next()
        self.journal.append("outcome", **outcome_data(outcome, self.environment))
        self._known[outcome.unit, outcome.rung] = outcome
        self.measured += 1
        return outcome

    def cancel(self) -> None:
        """Forget what is not answered."""
        self._answers.clear()
        self.inner.cancel()


def error_counts(journal: Journal) -> dict[str, int]:
    """How many outcomes ended in each error class."""
    counts: Counter[ErrorClass] = Counter(entry.data["error"] for entry in journal.of("outcome") if entry.data["error"])
    return dict(sorted(counts.items()))


def most_frequent(journal: Journal, environment: str, size: int) -> str:
    """Why most configs failed at one batch size in this environment, `error: reason`; empty where none did."""
    counts = Counter(
        f"{entry.data['error']}: {entry.data['reason']}" if entry.data["reason"] else str(entry.data["error"])
        for entry in journal.of("outcome")
        if entry.data["env"] == environment and entry.data["size"] == size and entry.data["error"]
    )
    return counts.most_common(1)[0][0] if counts else ""
