"""Words that kernels count in and set back to zero: one for launches that follow one another, never shared otherwise.

Two launches that may run at once must not count in one word. Eager launches share one per stream, where they run one
after the other. A launch that goes into a graph keeps one for good: nobody knows beside what its graph is replayed.
"""

from __future__ import annotations

import threading

import torch

from xkernels.device import of

_BLOCK = 4096  # words allocated at once
_APART = 4  # words from one to the next: Triton compiles for whether a pointer is a multiple of 16 bytes
_LOCK = threading.Lock()
_POOLS: dict[torch.device, _Pool] = {}


class _Pool:
    """The words of one device."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []  # all of them are kept: graphs know addresses only
        self.left = 0
        self.by_queue: dict[int, torch.Tensor] = {}

    def next(self) -> torch.Tensor | None:
        """A word that nobody has, None where all are taken."""
        if not self.left:
            return None
        self.left -= 1
        return self.blocks[-1][self.left, :1]

    def refill(self, device: torch.device) -> None:
        """New words where half of a block is gone; they are zero for every stream when this returns."""
        if self.left * 2 <= _BLOCK:
            self.blocks.append(torch.zeros(_BLOCK, _APART, dtype=torch.int32, device=device))
            self.left = _BLOCK
            of(self.blocks[-1]).synchronize()


def counter(like: torch.Tensor) -> torch.Tensor:
    """A zero, int32 [1], on the device of `like`, for the launch that comes next on its current stream.

    The kernel leaves it zero again. Within a capture it is the launch's own; where none is left (they are allocated
    outside captures only), one that the graph itself sets to zero at each replay.
    """
    if like.is_meta:
        return like.new_zeros(1, dtype=torch.int32)
    device = of(like)
    with _LOCK:
        pool = _POOLS.setdefault(like.device, _Pool())
        if device.capturing():
            word = pool.next()
            return torch.zeros(1, dtype=torch.int32, device=like.device) if word is None else word
        pool.refill(like.device)
        found = pool.by_queue.get(device.queue())
        if found is None:
            found = pool.next()
            assert found is not None
            pool.by_queue[device.queue()] = found
        return found
