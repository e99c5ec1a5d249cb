"""Finals and verification: the whole op, in a process that did not search, against the default.

The winner is kept only where it beats the default beyond noise and computes the right thing, twice the same; else the
next contender is tried, and in the end the default stays.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moegate.errors import InfraError
from moegate.journal import Journal
from tuner.child.client import ChildSpec, Worker, WorkerLost
from tuner.config import Config
from tuner.crossed import Pair, races
from tuner.live import LiveOptions
from tuner.playoff import levels
from tuner.problem import Problem
from tuner.strategies.base import Choice

__all__ = ["Final", "Finals", "decide"]

# Below this a difference is not worth a file's entry, however sure it is.
_FLOOR = 0.002
_SIGMA = 1.4826
_NO_DEFAULT = "the default config does not run here"


@dataclass(frozen=True)
class Final:
    """The end of one batch size. Times are medians of the whole op in microseconds, spreads their MAD."""

    batch_size: int
    configs: Pair
    winner_us: float
    default_us: float
    winner_spread_us: float = 0.0
    default_spread_us: float = 0.0
    kept_default: bool = False
    verified: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Default time over winner time."""
        return self.default_us / self.winner_us if self.winner_us else 1.0


def decide(samples: Sequence[Sequence[float]], default: int) -> list[int]:
    """Indices of candidates from best to worst; those that do not beat the default beyond noise come after it.

    Rounds are paired: sample i of every candidate was measured within one round, so that a drift of the machine
    cancels; a candidate that dropped out has fewer samples. To beat the default it must be faster by 0.2 % and by
    twice the noise of the median difference (1.4826 MAD / sqrt(n)).
    """
    found, _ = levels(samples)
    beats = []
    for place, row in enumerate(samples):
        both = list(zip(samples[default], row, strict=False))
        gains = [base - own for base, own in both]
        noise = _SIGMA * _mad(gains) / len(gains) ** 0.5
        least = max(_FLOOR * statistics.median(base for base, _ in both), 2 * noise)
        if place != default and statistics.median(gains) > least:
            beats.append(place)
    rest = [place for place in range(len(samples)) if place not in beats and place != default]
    return [*sorted(beats, key=lambda p: found[p]), default, *sorted(rest, key=lambda p: found[p])]


def _mad(row: Sequence[float]) -> float:
    middle = statistics.median(row)
    return statistics.median(abs(value - middle) for value in row)


class Finals:
    """Plays the finals of all batch sizes in one fresh child."""

    def __init__(
        self, spec: ChildSpec, problem: Problem, options: LiveOptions, journal: Journal, environment: str = ""
    ) -> None:
        self.problem, self.options, self.journal = problem, options, journal
        self.worker = Worker(spec, "finals", [("setup", options.setup(problem))])
        self.spent: dict[str, float] = {}
        self.compiled_late: list[str] = []
        self._warming = threading.Thread(target=self._begin, daemon=True)
        self.enter(environment)

    def enter(self, environment: str) -> None:
        """Say what the outcomes depend on; what the journal holds of it is not asked again."""
        self.environment = environment
        self._done = {
            (entry.kind, entry.data["size"], _spell(entry.data["candidates"])): entry.data["answer"]
            for entry in self.journal.of("final", "verify")
            if entry.data["env"] == environment
        }

    def warm(self) -> None:
        """Start the child, and let it get ready in the background, beside all others."""
        self.worker.spawn()
        self._warming.start()

    def settle(self) -> None:
        """Wait until the child has started: from here on it leaves the device alone until it is asked."""
        if self._warming.is_alive():
            self._warming.join()

    def close(self) -> None:
        """End the child."""
        if self._warming.is_alive():
            self.worker.interrupt()
        self.settle()
        self.worker.kill()

    def _begin(self) -> None:
        with contextlib.suppress(WorkerLost, InfraError):  # whoever needs the child starts it again and hears why
            self.worker.start(self.options.first_deadline_s)

    def play(self, choice: Choice, default: Pair, rounds: int) -> Final:
        """One batch size: a race, and a second one of what the first makes likely."""
        size = choice.batch_size
        candidates = [default, *(c for c in choice.contenders if c != default)]
        notes: list[str] = []

        def race(pairs: Sequence[Pair], rounds: int) -> list[list[float]]:
            samples, more = self._samples(size, pairs, rounds)
            notes.extend(more)
            return samples

        tried: list[Pair] = []
        for pairs, samples in reversed(races(race, choice.contenders, default, candidates, rounds)):
            final = self._won(size, pairs, samples, notes, tried)
            if final is not None:
                return final
        raise InfraError(f"no config computes {self.problem.op} at batch size {size}: {'; '.join(notes)}")

    def _won(
        self, size: int, pairs: list[Pair], samples: list[list[float]], notes: list[str], tried: list[Pair]
    ) -> Final | None:
        """The best of a race that computes the right thing, the first pair being the default; None where none does.

        What was found wrong is added to `notes` and to `tried`, which is not tried again.
        """
        alive = [place for place, row in enumerate(samples) if row]
        rows = [samples[place] for place in alive]
        if 0 in alive:
            order = decide(rows, alive.index(0))
        else:
            if _NO_DEFAULT not in notes:
                notes.append(_NO_DEFAULT)
            found = levels(rows)[0] if rows else []
            order = sorted(range(len(rows)), key=lambda rank: found[rank])
        for place in (alive[rank] for rank in order if pairs[alive[rank]] not in tried):
            reason = self._wrong(size, pairs[place])
            if reason is None:
                return self._final(size, pairs[place], samples[place], samples[0], place == 0, notes)
            notes.append(f"{_words(pairs[place])}: {reason}")
            tried.append(pairs[place])
        return None

    def _final(
        self, size: int, configs: Pair, row: list[float], default: list[float], kept: bool, notes: list[str]
    ) -> Final:
        # Over the rounds that both played: one that drops out early does not see how the machine changes later.
        pairs = list(zip(row, default or row, strict=False))
        own, base = [winner for winner, _ in pairs], [other for _, other in pairs]
        return Final(
            size, configs, round(statistics.median(own), 3), round(statistics.median(base), 3), round(_mad(own), 3),
            round(_mad(base), 3), kept, True, tuple(notes),
        )  # fmt: skip

    def _samples(self, size: int, candidates: Sequence[Pair], rounds: int) -> tuple[list[list[float]], list[str]]:
        """Samples per candidate; where the joint race fails each is run alone, and the guilty one gets no samples."""
        answer = self._ask("final", size, candidates, rounds=rounds)
        if "error" not in answer:
            return answer["samples_us"], []
        samples: list[list[float]] = []
        notes = []
        for candidate in candidates:
            alone = self._ask("final", size, [candidate], rounds=rounds)
            samples.append([] if "error" in alone else alone["samples_us"][0])
            if "error" in alone:
                notes.append(f"{_words(candidate)}: {alone['error']}: {alone['reason']}")
        return samples, notes

    def _wrong(self, size: int, configs: Pair) -> str | None:
        answer = self._ask("verify", size, [configs])
        return f"{answer['error']}: {answer['reason']}" if "error" in answer else None

    def _ask(self, kind: str, size: int, candidates: Sequence[Pair], **more: Any) -> dict[str, Any]:
        plain = [{projection: config.as_dict() for projection, config in pair.items()} for pair in candidates]
        key = (kind, size, _spell(plain))
        if key in self._done:
            return self._done[key]
        args = {"candidates": plain, **more} if kind == "final" else {"configs": plain[0]}
        limit = self.options.first_deadline_s
        self.settle()
        answer: dict[str, Any] = {}
        for _ in range(2):  # a crash is tried once more in a fresh process: something else may have caused it
            try:
                answer = self.worker.ask("finals" if kind == "final" else "verify", limit, size=size, **args)
                break
            except WorkerLost as lost:
                answer = {"error": lost.kind, "reason": lost.reason}
                if lost.kind != "crashed":
                    break
        self.spent.update(answer.get("spent", {}))
        self.compiled_late = answer.get("compiled", self.compiled_late)
        answer = {
            name: value for name, value in answer.items() if name in ("samples_us", "error", "reason", "max_rel", "rms")
        }
        if "samples_us" in answer:
            answer["samples_us"] = [[round(us, 3) for us in row] for row in answer["samples_us"]]
        self.journal.append(kind, env=self.environment, size=size, candidates=plain, answer=answer)
        self._done[key] = answer
        return answer


def _spell(candidates: Sequence[dict[Any, dict[str, Any]]]) -> str:
    return " | ".join(_words({p: Config.of(c) for p, c in pair.items()}) for pair in candidates)


def _words(pair: Pair) -> str:
    return ", ".join(f"{projection} {pair[projection].spell()}" for projection in sorted(pair))
