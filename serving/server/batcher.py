"""Continuous batching over slots: waiting requests are prefilled as soon as a slot is free, all others decode together.

One step is one pass of the decoder. Prefill goes first, because a waiting client costs more than a late token; a step
prefills as many waiting prompts as slots and the token budget allow, and at least one. A prompt is never cut.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from serving.server.decoder import Decoder, Prompt

__all__ = ["Batcher", "Request", "Token"]

DecodeStep = Callable[[Sequence[int], Sequence[int], Sequence[int]], torch.Tensor]
"""(last tokens, their positions, slots) of the running sequences -> logits float32 [B, vocab]."""


@dataclass
class Request:
    """One sequence. `tokens` grows by one id a step; `slot` is -1 while it waits."""

    id: int
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False
    logprobs: bool = False
    slot: int = -1
    tokens: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where its last token stands."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class Token:
    """One token of one request. `finish` is `stop` or `length` with the last one; `logprob` only where asked for."""

    id: int
    token: int
    finish: str | None
    logprob: float | None


class Batcher:
    """Decides what the next step does.

    Args:
        decoder: runs the steps; its cache says how many slots there are.
        prefill_tokens: rows that one prefill step may have (a longer prompt goes alone).
        decode: replaces the eager decode step (device graphs).
    """

    def __init__(self, decoder: Decoder, prefill_tokens: int, decode: DecodeStep | None = None) -> None:
        self.decoder, self.prefill_tokens = decoder, prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.free = list(range(decoder.cache.slots))[::-1]
        self.sizes: Counter[int] = Counter()
        self._decode = decode or self._eager

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for a slot."""
        self.waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """Forget a request, wherever it is; an unknown id is one that has just ended."""
        request = self.running.get(request_id)
        if request is not None:
            self._release(request)
        else:
            self.waiting = deque(item for item in self.waiting if item.id != request_id)

    def step(self) -> list[Token]:
        """Run one step and return its tokens, one per sequence that took part."""
        admitted = self._admit()
        if admitted:
            return self._prefill(admitted)
        batch = list(self.running.values())
        if not batch:
            return []
        self.sizes[len(batch)] += 1
        logits = self._decode([r.tokens[-1] for r in batch], [r.position for r in batch], [r.slot for r in batch])
        return self._take(batch, logits[: len(batch)])

    def repeat(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """A decode step that can be issued again and again with the same inputs, for timing."""
        repeat = getattr(self._decode, "repeat", None)
        if repeat is not None:
            found: Callable[[], torch.Tensor] = repeat(tokens, positions, slots)
            return found
        packed = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(self.decoder.device)
        span = self.decoder.span(positions)
        return lambda: self.decoder.decode(packed[0], packed[1], packed[2], span)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        rows = 0
        while self.waiting and self.free:
            rows += len(self.waiting[0].prompt)
            if admitted and rows > self.prefill_tokens:
                break
            request = self.waiting.popleft()
            request.slot = self.free.pop()
            admitted.append(request)
        return admitted

    def _prefill(self, admitted: list[Request]) -> list[Token]:
        self.running.update({request.id: request for request in admitted})
        self.sizes[sum(len(request.prompt) for request in admitted)] += 1
        logits = self.decoder.prefill([Prompt(request.prompt, request.slot) for request in admitted])
        return self._take(admitted, logits)

    def _eager(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        packed = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(self.decoder.device)
        return self.decoder.decode(packed[0], packed[1], packed[2], self.decoder.span(positions))

    def _take(self, batch: list[Request], logits: torch.Tensor) -> list[Token]:
        """Choose the likeliest token of each row and move every sequence on by one."""
        best = logits.argmax(-1)
        chances: list[float] = []
        if any(request.logprobs for request in batch):
            chances = logits.log_softmax(-1).gather(1, best[:, None])[:, 0].tolist()
        out: list[Token] = []
        for row, (request, token) in enumerate(zip(batch, best.tolist(), strict=True)):
            request.tokens.append(token)
            finish = self._finish(request, token)
            if finish is not None:
                self._release(request)
            out.append(Token(request.id, token, finish, chances[row] if request.logprobs else None))
        return out

    def _finish(self, request: Request, token: int) -> str | None:
        if not request.ignore_eos and token in self.decoder.spec.eos:
            return "stop"
        return "length" if len(request.tokens) >= request.max_tokens else None

    def _release(self, request: Request) -> None:
        del self.running[request.id]
        self.free.append(request.slot)
