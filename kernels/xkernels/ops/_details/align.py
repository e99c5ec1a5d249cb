"""Kernels of `moe_align_block_size`.

Bucket b holds expert b - 1, so the entries of no local expert (-1, and any other value that names none) come first. An
entry's place is its bucket's start plus its rank, the number of equal entries before it: the order is stable and no
atomics are needed. A program goes through its part of the entries chunk by chunk; LOWEST 0 leaves the entries of no
expert out. Shared memory stays within what every target has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import helper


@helper
def _bucket_of(ids_ptr, offs, numel, EXPERTS: tl.constexpr, LOWEST: tl.constexpr):
    """Bucket of each entry; one that no column has for entries past the end and for experts below LOWEST."""
    ids = tl.load(ids_ptr + offs, mask=offs < numel, other=-1)
    expert = tl.where((ids >= 0) & (ids < EXPERTS), ids, -1).to(tl.int32)
    return tl.where((offs < numel) & (expert >= LOWEST), expert + 1, -1)


@helper
def _expert_of_blocks(ends, expert_ids_ptr, blocks, BLOCK: tl.constexpr, BUCKETS: tl.constexpr, EXPERTS: tl.constexpr,
                      FILL: tl.constexpr, first, step):  # fmt: skip
    """Write the expert of each block: the number of buckets that end at or before the block's start, less one."""
    columns = tl.arange(0, BUCKETS)
    for start in range(first * FILL, blocks, step * FILL):
        block = start + tl.arange(0, FILL)
        closed = tl.sum((ends[None, :] <= block[:, None] * BLOCK).to(tl.int32) * (columns < EXPERTS + 1)[None, :], 1)
        tl.store(expert_ids_ptr + block, tl.where(closed > EXPERTS, -1, closed - 1), mask=block < blocks)


@helper
def _rank(bucket, CHUNK: tl.constexpr):
    """How many entries of the chunk before each one have its bucket."""
    at = tl.arange(0, CHUNK)
    before = (bucket[:, None] == bucket[None, :]) & (at[None, :] < at[:, None])
    return tl.sum(before.to(tl.int32), 1)


@helper
def _place_part(ids_ptr, sorted_ptr, base, first, last, numel, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
                BUCKETS: tl.constexpr, LOWEST: tl.constexpr):  # fmt: skip
    """Store the entries first to last, whose buckets' next free places are `base`."""
    columns = tl.arange(0, BUCKETS)
    for start in range(first, last, CHUNK):
        offs = start + tl.arange(0, CHUNK)
        bucket = _bucket_of(ids_ptr, offs, numel, EXPERTS, LOWEST)
        onehot = (bucket[:, None] == columns[None, :]).to(tl.int32)
        place = _rank(bucket, CHUNK) + tl.sum(onehot * base[None, :], 1)
        tl.store(sorted_ptr + place, offs, mask=bucket >= 0)
        base += tl.sum(onehot, 0)


@helper
def _finish(padded, ends, expert_ids_ptr, post_ptr, blocks, first, step, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
            BUCKETS: tl.constexpr):  # fmt: skip
    """The experts of the blocks and the used length."""
    if first == 0:
        tl.store(post_ptr, tl.sum(padded, 0))
        tl.store(post_ptr + 1, tl.sum(tl.where(tl.arange(0, BUCKETS) == 0, padded, 0), 0) // BLOCK)
    _expert_of_blocks(ends, expert_ids_ptr, blocks, BLOCK, BUCKETS, EXPERTS, 32, first, step)


@helper
def align_entries(bucket, entry, sorted_ptr, expert_ids_ptr, post_ptr, numel, cap, blocks, BLOCK: tl.constexpr,
                  CHUNK: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """The whole alignment of CHUNK entries in one program; those of bucket -1 do not count.

    An entry whose rank is a multiple of BLOCK opens a block; an expert's blocks begin after all that smaller ones open.
    """
    for start in range(0, cap, FILL):
        at = start + tl.arange(0, FILL)
        tl.store(sorted_ptr + at, tl.zeros([FILL], tl.int32) + numel, mask=at < cap)
    for start in range(0, blocks, FILL):
        at = start + tl.arange(0, FILL)
        tl.store(expert_ids_ptr + at, tl.zeros([FILL], tl.int32) - 1, mask=at < blocks)
    rank = _rank(bucket, CHUNK)
    opens = ((rank % BLOCK == 0) & (bucket >= 0)).to(tl.int32)
    first = tl.sum((bucket[None, :] < bucket[:, None]).to(tl.int32) * opens[None, :], 1)
    tl.debug_barrier()  # the padding must be written before the entries
    tl.store(sorted_ptr + first * BLOCK + rank, entry, mask=bucket >= 0)
    tl.store(expert_ids_ptr + first + rank // BLOCK, bucket - 1, mask=opens > 0)
    tl.store(post_ptr, tl.sum(opens, 0) * BLOCK)
    tl.store(post_ptr + 1, tl.sum(tl.where(bucket == 0, opens, 0), 0))


@triton.jit(do_not_specialize=["numel", "cap", "blocks"])
def align_one(ids_ptr, sorted_ptr, expert_ids_ptr, post_ptr, numel, cap, blocks, BLOCK: tl.constexpr,
              CHUNK: tl.constexpr, EXPERTS: tl.constexpr, LOWEST: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Everything in one program, for routings that fit one chunk: entries are compared with each other, not counted."""
    at = tl.arange(0, CHUNK)
    bucket = _bucket_of(ids_ptr, at, numel, EXPERTS, LOWEST)
    align_entries(bucket, at, sorted_ptr, expert_ids_ptr, post_ptr, numel, cap, blocks, BLOCK, CHUNK, FILL)


@triton.jit(do_not_specialize=["numel", "cap", "part"])
def count(ids_ptr, counts_ptr, sorted_ptr, numel, cap, part, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
          BUCKETS: tl.constexpr, LOWEST: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Entries per bucket of this program's part; also fills `sorted` with padding."""
    pid = tl.program_id(0)
    columns = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.int32)
    for start in range(pid * part, min(pid * part + part, numel), CHUNK):
        bucket = _bucket_of(ids_ptr, start + tl.arange(0, CHUNK), numel, EXPERTS, LOWEST)
        total += tl.sum((bucket[:, None] == columns[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + pid * BUCKETS + columns, total)
    for start in range(pid * FILL, cap, tl.num_programs(0) * FILL):
        at = start + tl.arange(0, FILL)
        tl.store(sorted_ptr + at, tl.zeros([FILL], tl.int32) + numel, mask=at < cap)


@triton.jit(do_not_specialize=["numel", "part", "blocks"])
def place(ids_ptr, counts_ptr, sorted_ptr, expert_ids_ptr, post_ptr, numel, part, blocks, ROWS: tl.constexpr,
          BLOCK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr,
          LOWEST: tl.constexpr):  # fmt: skip
    """Put this part's entries in their places; every program adds up the counts of all parts itself."""
    pid = tl.program_id(0)
    parts = tl.num_programs(0)
    columns = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.int32)
    before = tl.zeros([BUCKETS], tl.int32)
    for start in range(0, parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        counts = tl.load(counts_ptr + rows[:, None] * BUCKETS + columns[None, :], mask=(rows < parts)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((rows < pid)[:, None], counts, 0), 0)
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    ends = tl.cumsum(padded, 0)
    first = pid * part
    _place_part(ids_ptr, sorted_ptr, ends - padded + before, first, min(first + part, numel), numel, CHUNK, EXPERTS,
                BUCKETS, LOWEST)  # fmt: skip
    _finish(padded, ends, expert_ids_ptr, post_ptr, blocks, pid, parts, BLOCK, EXPERTS, BUCKETS)
