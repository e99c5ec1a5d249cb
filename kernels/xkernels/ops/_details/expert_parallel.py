"""Kernels of expert parallelism: where a row goes, gather into the send buffer, weighted sum on the way back."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow


@triton.jit(do_not_specialize=["numel", "per_program"])
def route(dest_ptr, place_ptr, counts_ptr, table_ptr, arrived_ptr, numel, per_program, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Place of each entry in a buffer ordered by destination rank, stable; and the number of entries per rank.

    dest int32 [numel], -1 for an entry that goes nowhere (its place is -1). One launch: each program counts its own
    range, all wait for each other, then each places its range. PROGRAMS must be resident together (`grid`).
    """
    pid = tl.program_id(0)
    ranks = tl.arange(0, RANKS)
    first = pid * per_program
    last = min(first + per_program, numel)
    mine = tl.zeros([RANKS], tl.int32)
    for start in range(first, last, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        dest = tl.load(dest_ptr + offs, mask=offs < last, other=-1)
        mine += tl.sum((dest[:, None] == ranks[None, :]).to(tl.int32), 0)
    tl.store(table_ptr + pid * RANKS + ranks, mine)
    tl.debug_barrier()  # every thread's counts are written before the arrival is
    tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    while tl.atomic_add(arrived_ptr, 0, sem="acq_rel") < PROGRAMS:
        pass
    total = tl.zeros([RANKS], tl.int32)
    before = tl.zeros([RANKS], tl.int32)
    for program in range(PROGRAMS):
        part = tl.load(table_ptr + program * RANKS + ranks, volatile=True)
        total += part
        before += tl.where(program < pid, part, 0)
    before += tl.cumsum(total, 0) - total
    for start in range(first, last, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        dest = tl.load(dest_ptr + offs, mask=offs < last, other=-1)
        onehot = (dest[:, None] == ranks[None, :]).to(tl.int32)
        rank_in_chunk = tl.cumsum(onehot, 0) - 1
        place = tl.sum(onehot * (rank_in_chunk + before[None, :]), 1)
        tl.store(place_ptr + offs, tl.where(dest >= 0, place, -1), mask=offs < last)
        before += tl.sum(onehot, 0)
    if pid == 0:
        tl.store(counts_ptr + ranks, total)


@triton.jit(do_not_specialize=["entries"])
def permute(x_ptr, out_ptr, place_ptr, entries, h, stride_x, stride_out, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """out[place[i]] = x[i // PER_TOKEN] for ROWS entries of BLOCK columns; entries with place -1 are skipped."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.load(place_ptr + entry, mask=entry < entries, other=-1)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place >= 0)[:, None] & (cols < h)[None, :]
    token = (entry // PER_TOKEN).to(tl.int64)
    rows = tl.load(x_ptr + token[:, None] * stride_x + cols[None, :], mask=mask)
    tl.store(out_ptr + place.to(tl.int64)[:, None] * stride_out + cols[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["factor"])
def unpermute(y_ptr, out_ptr, place_ptr, weights_ptr, h, stride_y, stride_out, factor, ENTRIES: tl.constexpr,
              WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[t] = factor * sum over ENTRIES of weight * y[place], in entry order and float32 whatever the batch is."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for entry in tl.static_range(ENTRIES):
        place = tl.load(place_ptr + token * ENTRIES + entry).to(tl.int64)
        row = tl.load(y_ptr + place * stride_y + cols, mask=(cols < h) & (place >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            # Rounded before the addition: a fused multiply-add here would make the bits depend on the compiler.
            row = row * tl.load(weights_ptr + token * ENTRIES + entry)
        total += row
    tl.store(out_ptr + token * stride_out + cols, narrow(total * factor, out_ptr.dtype.element_ty), mask=cols < h)
