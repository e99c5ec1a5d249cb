"""A recording whose answers scatter as a device's do, to see what a search is worth when no sample is true.

The recorded times are taken as the true ones. Every sample is off by itself (`sd`) and with its neighbours in time
(`drift`: a wave over `period` samples). After the search come the finals, as they are played on a device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tuner.config import Config
from tuner.crossed import Pair, races
from tuner.effort import Effort
from tuner.finals import decide
from tuner.playoff import play
from tuner.prior import Prior
from tuner.problem import Projection
from tuner.replay import Recorded, Replay, Row, Score, task_of
from tuner.strategies.base import Choice, Outcome, Request, Strategy, Unit

__all__ = ["Noise", "NoisyReplay", "noisy_score"]


@dataclass
class Noise:
    """Factors to multiply true times with, the same for the same seed. `sd` and `drift` are shares of the time."""

    sd: float = 0.015
    drift: float = 0.01
    period: int = 3000
    seed: int = 0
    samples: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        self._phase = self._random.uniform(0, math.tau)

    def factor(self) -> float:
        """The next sample's."""
        self.samples += 1
        wave = self.drift * math.sin(math.tau * self.samples / self.period + self._phase)
        return (1 + wave) * (1 + self._random.gauss(0, self.sd))


class NoisyReplay(Replay):
    """Answers from a recording with noise; a second sample is taken only where the first is not above the bar."""

    def __init__(self, recorded: Recorded, noise: Noise) -> None:
        super().__init__(recorded)
        self.noise = noise

    def _one(self, request: Request) -> Outcome:
        true = super()._one(request)
        bar = request.bar()
        samples: list[float] = []
        for us in true.samples_us:
            samples.append(us * self.noise.factor())
            if bar is not None and samples[0] > bar:
                break
        return Outcome(true.unit, true.rung, tuple(samples), true.error, true.reason)


def noisy_score(
    recorded: Recorded, strategy: Strategy, prior: Prior | None, effort: Effort, noise: Noise,
    served: Recorded | None = None,
) -> Score:  # fmt: skip
    """Let a strategy search a recording under noise and play the finals; regret is of the true times.

    The finals end with the winner, whether or not it beats the default: what they keep then is a matter of its own.
    `served`: what configs take within the whole op, which the finals time, where that is not what they take alone.
    """
    served = served or recorded
    task = task_of(recorded, effort, prior)
    findings = strategy.tune(task, NoisyReplay(recorded, noise))
    rows = []
    for size in recorded.sizes:
        arena = findings.arenas[size]
        default = dict.fromkeys(recorded.projections, task.default(size))
        chosen = _final(served, findings.choices[size], default, effort.final_rounds, noise)
        rows.append(Row(size, chosen, served.best(size), len(arena.samples) + len(arena.errors)))
    return Score(tuple(rows), findings.evaluations, recorded.visited)


def _final(recorded: Recorded, choice: Choice, default: dict[Projection, Config], rounds: int, noise: Noise) -> float:
    """The true time of whoever wins."""
    size = choice.batch_size
    others = [pair for pair in choice.contenders if pair != default]
    running = [pair for pair in (default, *others) if _true(recorded, size, pair) < math.inf]
    race = partial(_race, recorded, noise, size)
    pairs, samples = races(race, choice.contenders, default, running, rounds)[-1]
    order = decide(samples, 0 if pairs[0] == default else len(pairs) - 1)
    return _true(recorded, size, pairs[order[0]])


def _race(recorded: Recorded, noise: Noise, size: int, pairs: Sequence[Pair], rounds: int) -> list[list[float]]:
    true = [_true(recorded, size, pair) for pair in pairs]

    def once(places: Sequence[int]) -> list[float]:
        return [true[place] * noise.factor() for place in places]

    return play(once, len(true), rounds)


def _true(recorded: Recorded, size: int, pair: Pair) -> float:
    return sum(recorded.times.get(Unit(size, p, pair[p]), math.inf) for p in recorded.projections)
