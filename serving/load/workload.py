"""What is sent: prompts, output lengths and arrivals, all from one seed, with a hash that both arms must share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from moegate import canonical
from moegate.errors import UsageError

__all__ = ["Call", "Workload"]


@dataclass(frozen=True)
class Call:
    """One request: prompt token ids, tokens to make, and when to send it (seconds from the start; None: when free)."""

    prompt: tuple[int, ...]
    output: int
    at: float | None = None


@dataclass(frozen=True)
class Workload:
    """A load. Either `concurrency` (closed loop) or `rate` (open loop, Poisson, requests per second) is given.

    `input` and `output` are tokens per request, `vocab` the ids that prompts are drawn from (0 to vocab - 1), and
    `room` the positions of one sequence (0: unknown).
    """

    requests: int
    input: int
    output: int
    seed: int
    vocab: int
    concurrency: int | None = None
    rate: float | None = None
    room: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("exactly one of --concurrency and --rate is needed", field="load")
        for name in ("requests", "input", "output", "vocab"):
            if getattr(self, name) < 1:
                raise UsageError(f"is {getattr(self, name)}; must be at least 1", field=name)
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"is {self.concurrency}; must be at least 1", field="concurrency")
        if self.rate is not None and not 0 < self.rate < 1e6:
            raise UsageError(f"is {self.rate}; must be a positive number of requests per second", field="rate")
        if self.room and self.input + self.output > self.room:
            raise UsageError(f"{self.input} + {self.output} tokens exceed the server's {self.room}", field="input")

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The measured requests, in order."""
        draw = random.Random(self.seed)  # noqa: S311 - reproducible, not secret
        prompts = [self._prompt(draw) for _ in range(self.requests)]
        times: list[float | None] = [None] * self.requests
        if self.rate is not None:
            clock = 0.0
            for index in range(self.requests):
                clock += draw.expovariate(self.rate)
                times[index] = clock
        return tuple(Call(prompt, self.output, at) for prompt, at in zip(prompts, times, strict=True))

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that is sent and when: two launches compare only where it is equal."""
        return canonical.digest([[call.prompt, call.output, call.at] for call in self.calls])

    def warm_up(self, parallel: int) -> list[list[Call]]:
        """Bursts to send before the load, each waited for: every batch size up to `parallel` runs once.

        Prefills of 1, 2, 4 .. requests first; then `parallel` requests whose answers end one step after the other,
        so that decode runs with every number of sequences. Whatever compiles or tunes itself lazily does it here.
        """
        draw = random.Random(self.seed ^ 0x5EED)  # noqa: S311
        sizes = [1 << power for power in range(parallel.bit_length()) if 1 << power < parallel]
        bursts = [[Call(self._prompt(draw), 1) for _ in range(size)] for size in sizes]
        longest = max(1, self.room - self.input) if self.room else max(self.output, parallel + 1)
        bursts.append([Call(self._prompt(draw), min(2 + index, longest)) for index in range(parallel)])
        return bursts

    def _prompt(self, draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.choices(range(self.vocab), k=self.input))
