"""What the parts of `large_gemm` agree on: the tile's size, and the rings in which they hand things over."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)  # rows of a warp group
COLS = gl.constexpr(256)  # weight rows of a tile
NOBODY = gl.constexpr(1 << 30)  # in place of an expert: the rows belong to none
SLOTS = gl.constexpr(2)  # tiles that the loader is ahead


@gluon.jit
def advance(index, phase, STAGES: gl.constexpr):
    """The next place in a ring, and its phase."""
    index += 1
    return gl.where(index == STAGES, 0, index), gl.where(index == STAGES, phase ^ 1, phase)


@gluon.jit
def back(index, steps: gl.constexpr, STAGES: gl.constexpr):
    """The place so many steps before one in a ring.

    Worked out, not carried along a loop: a variable that begins as a copy of another one, and is set to a copy of it
    in the loop, is compiled as if the loop never changed it (seen in triton 3.6 and 3.8).
    """
    return gl.where(index < steps, index + STAGES, index) - steps


@gluon.jit
def take(words, ready, free, turn, HANDS: gl.constexpr):
    """The word of tile number `turn`, out of the ring of tiles."""
    slot = turn % SLOTS
    mbarrier.wait(ready.index(slot), turn // SLOTS & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HANDS], [0])
    word = gl.max(words.index(slot).load(layout), 0)
    mbarrier.arrive(free.index(slot), count=1)
    return word


@gluon.jit
def give(words, ready, free, turn, word, HANDS: gl.constexpr):
    """Put a tile's word into the ring of tiles."""
    slot = turn % SLOTS
    mbarrier.wait(free.index(slot), (turn // SLOTS & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [HANDS], [0])
    words.index(slot).store(gl.full([1], word, gl.int64, layout=layout))
    mbarrier.arrive(ready.index(slot), count=1)
