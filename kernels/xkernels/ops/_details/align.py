"""Kernels of `moe_align_block_size`.

Bucket b of a chunk's one-hot table holds expert b - 1, so the entries of no local expert (-1) come first. A running
sum down the table gives each entry its rank in its bucket: the order is stable and no atomics are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bucket_of(ids_ptr, offs, numel, EXPERTS: tl.constexpr):
    """Bucket of each entry; a bucket that no column has for entries past the end or out of range."""
    ids = tl.load(ids_ptr + offs, mask=offs < numel, other=EXPERTS).to(tl.int32)
    return tl.where((ids >= -1) & (ids < EXPERTS), ids + 1, -1)


@triton.jit
def _expert_of_blocks(ends, expert_ids_ptr, blocks, BLOCK: tl.constexpr, BUCKETS: tl.constexpr, EXPERTS: tl.constexpr,
                      FILL: tl.constexpr, first, step):  # fmt: skip
    """Write the expert of each block: the number of buckets that end at or before the block's start, less one."""
    columns = tl.arange(0, BUCKETS)
    for start in range(first * FILL, blocks, step * FILL):
        block = start + tl.arange(0, FILL)
        closed = tl.sum((ends[None, :] <= block[:, None] * BLOCK).to(tl.int32) * (columns < EXPERTS + 1)[None, :], 1)
        tl.store(expert_ids_ptr + block, tl.where(closed > EXPERTS, -1, closed - 1), mask=block < blocks)


@triton.jit(do_not_specialize=["numel", "cap", "blocks"])
def align_one(ids_ptr, sorted_ptr, expert_ids_ptr, post_ptr, numel, cap, blocks, BLOCK: tl.constexpr,
              CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Everything in one program, for routings that fit one chunk."""
    columns = tl.arange(0, BUCKETS)
    for start in range(0, cap, FILL):
        at = start + tl.arange(0, FILL)
        tl.store(sorted_ptr + at, tl.zeros([FILL], tl.int32) + numel, mask=at < cap)
    offs = tl.arange(0, CHUNK)
    bucket = _bucket_of(ids_ptr, offs, numel, EXPERTS)
    onehot = (bucket[:, None] == columns[None, :]).to(tl.int32)
    total = tl.sum(onehot, 0)
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    rank = tl.cumsum(onehot, 0) - 1 + (ends - padded)[None, :]
    place = tl.sum(onehot * rank, 1)
    tl.debug_barrier()  # the padding must be written before the entries
    tl.store(sorted_ptr + place, offs, mask=bucket >= 0)
    tl.store(post_ptr, tl.sum(padded, 0))
    tl.store(post_ptr + 1, tl.sum(tl.where(columns == 0, padded, 0), 0) // BLOCK)
    _expert_of_blocks(ends, expert_ids_ptr, blocks, BLOCK, BUCKETS, EXPERTS, 32, 0, 1)


@triton.jit(do_not_specialize=["numel", "cap", "chunks"])
def count(ids_ptr, counts_ptr, sorted_ptr, numel, cap, chunks, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
          EXPERTS: tl.constexpr, BUCKETS: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Entries per bucket of this program's chunk; also fills `sorted` with padding."""
    pid = tl.program_id(0)
    columns = tl.arange(0, BUCKETS)
    offs = pid * CHUNK + tl.arange(0, CHUNK)
    bucket = _bucket_of(ids_ptr, offs, numel, EXPERTS)
    onehot = (bucket[:, None] == columns[None, :]).to(tl.int32)
    tl.store(counts_ptr + pid * BUCKETS + columns, tl.sum(onehot, 0))
    for start in range(pid * FILL, cap, chunks * FILL):
        at = start + tl.arange(0, FILL)
        tl.store(sorted_ptr + at, tl.zeros([FILL], tl.int32) + numel, mask=at < cap)


@triton.jit(do_not_specialize=["numel", "chunks", "blocks"])
def place(ids_ptr, counts_ptr, sorted_ptr, expert_ids_ptr, post_ptr, numel, chunks, blocks, ROWS: tl.constexpr,
          BLOCK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr,
          FILL: tl.constexpr):  # fmt: skip
    """Put this chunk's entries in their places; every program adds up the counts of all chunks itself."""
    pid = tl.program_id(0)
    columns = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.int32)
    before = tl.zeros([BUCKETS], tl.int32)
    for start in range(0, chunks, ROWS):
        rows = start + tl.arange(0, ROWS)
        part = tl.load(counts_ptr + rows[:, None] * BUCKETS + columns[None, :], mask=(rows < chunks)[:, None], other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((rows < pid)[:, None], part, 0), 0)
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    offs = pid * CHUNK + tl.arange(0, CHUNK)
    bucket = _bucket_of(ids_ptr, offs, numel, EXPERTS)
    onehot = (bucket[:, None] == columns[None, :]).to(tl.int32)
    rank = tl.cumsum(onehot, 0) - 1 + (ends - padded + before)[None, :]
    tl.store(sorted_ptr + tl.sum(onehot * rank, 1), offs, mask=bucket >= 0)
    if pid == 0:
        tl.store(post_ptr, tl.sum(padded, 0))
        tl.store(post_ptr + 1, tl.sum(tl.where(columns == 0, padded, 0), 0) // BLOCK)
    tl.store(post_ptr + 1, tl.sum(tl.where(columns == 0, padded, 0), 0) // BLOCK)
    _expert_of_blocks(ends, expert_ids_ptr, blocks, BLOCK, BUCKETS, EXPERTS, 32, pid, chunks)
