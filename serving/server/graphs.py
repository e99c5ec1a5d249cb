"""Decode steps as device graphs (`--graph full`): padded batch sizes, every input refreshed, padding without effect.

The contract, whichever device replays it:

- a graph exists per padded batch size and span of positions, and a batch runs in the smallest graph that holds it;
- before a replay every input slot of every row is written: real rows from the batch, all others with the padding row
  (position -1), so that nothing of an earlier batch can be left over;
- a row without its token, position or slot is refused, not replayed with what was there before;
- padded rows write to the cache's row 0, which no sequence reads, and their logits are cut off.

Where the device has no graphs (the CPU) the same padded step runs eagerly: contract and numbers are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serving.server.decoder import Decoder
from xkernels import device as devices

__all__ = ["GraphedDecode", "Inputs", "StaleInput", "padded_sizes"]


class StaleInput(ValueError):
    """A replay was asked for with an input slot that nobody wrote."""


def padded_sizes(slots: int) -> tuple[int, ...]:
    """Batch sizes that have a graph: 1, 2, 4, 8, then every 8 up to 64, then every 16, and always `slots`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, slots, 16)]
    return tuple(sorted({size for size in sizes if size < slots} | {slots}))


class Inputs:
    """The input slots of one graph: tokens, positions and slots, int64 [3, size], on the device.

    Written through a host copy that is wholly replaced at each `fill`.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.static = torch.zeros((3, size), dtype=torch.int64, device=device)
        self._fresh = False

    def fill(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        """Write every row: the batch, then padding.

        Raises:
            StaleInput: the three do not have one value per row, or do not fit.
        """
        rows = len(tokens)
        if not rows == len(positions) == len(slots):
            raise StaleInput(f"{rows} tokens, {len(positions)} positions and {len(slots)} slots: a row would be stale")
        if not 0 < rows <= self.size:
            raise StaleInput(f"{rows} rows do not fit a graph of {self.size}")
        if min(positions) < 0:
            raise StaleInput("a real row has no position")
        spare = self.size - rows
        # Through an array: torch takes three times as long to read nested lists of 96 rows, at every token.
        host = array("q", [*tokens, *[0] * spare, *positions, *[-1] * spare, *slots, *[0] * spare])
        self.static.copy_(torch.frombuffer(host, dtype=torch.int64).view(3, self.size), non_blocking=False)
        self._fresh = True

    def take(self) -> torch.Tensor:
        """The static tensor for one replay; a second replay needs another `fill`."""
        if not self._fresh:
            raise StaleInput("the inputs of the last replay were not refreshed")
        self._fresh = False
        return self.static


@dataclass
class _Captured:
    inputs: Inputs
    logits: torch.Tensor | None
    graph: devices.Graph | None


class GraphedDecode:
    """The decode step over captured graphs; a call has the signature of `batcher.DecodeStep`."""

    def __init__(self, decoder: Decoder, live: Any) -> None:
        self.decoder, self.live = decoder, live
        self.sizes = padded_sizes(decoder.cache.slots)
        self._captured: dict[tuple[int, int], _Captured] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """Logits float32 [B, vocab] of the batch, without the padding."""
        size = self._size(len(tokens))
        entry = self._entry(size, self.span(positions))
        entry.inputs.fill(tokens, positions, slots)
        static = entry.inputs.take()
        if entry.graph is None or entry.logits is None:
            return self._eager(static, self.span(positions))[: len(tokens)]
        entry.graph.replay()
        self._count(size)
        return entry.logits[: len(tokens)]

    def repeat(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """The step of one batch without its inputs being written again, for timing: every replay has the same ones."""
        self(tokens, positions, slots)
        size, span = self._size(len(tokens)), self.span(positions)
        entry = self._entry(size, span)
        graph, logits = entry.graph, entry.logits
        if graph is None or logits is None:
            return lambda: self._eager(entry.inputs.static, span)

        def replay() -> torch.Tensor:
            graph.replay()
            self._count(size)
            return logits

        return replay

    def _size(self, rows: int) -> int:
        return next((size for size in self.sizes if size >= rows), self.sizes[-1])

    def span(self, positions: Sequence[int]) -> int:
        """Positions that a graph attends to: all of them where the attention stops at each sequence's own length, else
        powers of two, so that there are few graphs."""
        if self.decoder.experts.fused:
            return self.decoder.cache.length
        need = max(positions) + 1
        return min(max(256, 1 << (need - 1).bit_length()), self.decoder.cache.length)

    def capture_all(self) -> None:
        """Capture every batch size now, largest first, so that no client waits for one."""
        for size in reversed(self.sizes):
            self._entry(size, self.span([0]))

    def _entry(self, size: int, span: int) -> _Captured:
        entry = self._captured.get((size, span))
        if entry is None:
            entry = self._captured[size, span] = self._capture(size, span)
        return entry

    def _capture(self, size: int, span: int) -> _Captured:
        inputs = Inputs(size, self.decoder.device)
        inputs.static.copy_(torch.tensor([[0], [-1], [0]]).expand(3, size))  # nothing but padding while it is captured
        held: list[torch.Tensor] = []

        def work() -> None:
            held[:] = [self._eager(inputs.static, span)]

        experts, in_turn = self.decoder.experts, self.decoder.beside
        before = experts.rows.copy()
        self.decoder.beside = self.live.beside
        try:
            graph = self.live.capture(work)
        finally:
            self.decoder.beside = in_turn
            experts.rows = before  # what was captured has served nobody
        return _Captured(inputs, held[0] if graph is not None else None, graph)

    def _eager(self, static: torch.Tensor, span: int) -> torch.Tensor:
        return self.decoder.decode(static[0], static[1], static[2], span)

    def _count(self, size: int) -> None:
        self.decoder.experts.rows[size] += len(self.decoder.spec.moe_layers)
