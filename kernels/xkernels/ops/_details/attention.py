"""Kernels of the KV cache: store, and attention of one new token per sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies


@triton.jit(do_not_specialize=["tokens", "slots", "skip"])
def store_kv(k, v, k_cache, v_cache, indices, tokens, slots, skip, stride_k, stride_v, stride_kc, stride_vc,
             K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """ROWS tokens, one part of their rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(indices + rows, mask=rows < tokens, other=-1).to(tl.int64)
    keep = (slot >= 0) & (slot < slots) & ((slot != skip) | (skip < 0))
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = rows.to(tl.int64)
    mask = keep[:, None] & (cols < K_WIDTH)[None, :]
    value = tl.load(k + row[:, None] * stride_k + cols[None, :], mask=mask)
    tl.store(k_cache + slot[:, None] * stride_kc + cols[None, :], value, mask=mask)
    mask = keep[:, None] & (cols < V_WIDTH)[None, :]
    value = tl.load(v + row[:, None] * stride_v + cols[None, :], mask=mask)
    tl.store(v_cache + slot[:, None] * stride_vc + cols[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["longest", "stride_slots", "scale", "splits"])
def decode_part(q, k_cache, v_cache, slots, lengths, part, peaks, totals, scale, longest, stride_slots, stride_qb,
                stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, splits, GROUP: tl.constexpr, D: tl.constexpr,
                DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
                MOST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Every MOST-th block of BLOCK cached tokens, for one head of one sequence, with a running softmax.

    Which blocks are taken together depends on the sequence alone: with fewer than MOST programs (`splits`) a sequence
    has no more blocks than programs, and each has its own.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // GROUP
    length = tl.minimum(tl.load(lengths + seq), longest)
    first = tl.program_id(2) * BLOCK
    ds = tl.arange(0, D_BLOCK)
    dvs = tl.arange(0, DV_BLOCK)
    wait_dependencies(PDL)
    launch_dependents(PDL)
    query = tl.load(q + seq * stride_qb + head * stride_qh + ds, mask=ds < D, other=0.0).to(tl.float32) * scale
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DV_BLOCK], tl.float32)
    for start in range(first, length, MOST * BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < length
        slot = tl.load(slots + seq * stride_slots + at, mask=live, other=0).to(tl.int64)
        keys = tl.load(k_cache + slot[:, None] * stride_ks + kv_head * stride_kh + ds[None, :],
                       mask=live[:, None] & (ds < D)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        values = tl.load(v_cache + slot[:, None] * stride_vs + kv_head * stride_vh + dvs[None, :],
                         mask=live[:, None] & (dvs < DV)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        score = tl.where(live, tl.sum(keys * query[None, :], 1), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 0))
        weight = tl.exp(score - new_peak)
        decay = tl.exp(peak - new_peak)
        acc = acc * decay + tl.sum(values * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        peak = new_peak
    one = tl.arange(0, 1)
    at_part = (seq * tl.num_programs(1) + head) * splits + tl.program_id(2)
    tl.store(peaks + at_part + one, peak)
    tl.store(totals + at_part + one, total)
    if first < length:
        tl.store(part + at_part * DV_BLOCK + dvs, acc)


@triton.jit(do_not_specialize=["splits"])
def decode_sum(part, peaks, totals, out, splits, stride_ob, stride_oh, DV: tl.constexpr, DV_BLOCK: tl.constexpr,
               MOST: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Join the parts of one head of one sequence, in their order."""
    wait_dependencies(PDL)
    launch_dependents(PDL)
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dvs = tl.arange(0, DV_BLOCK)
    base = (seq * tl.num_programs(1) + head) * splits
    each = tl.arange(0, MOST)
    mine = tl.load(totals + base + each, mask=each < splits, other=0.0)
    used = mine > 0.0
    height = tl.load(peaks + base + each, mask=used, other=float("-inf"))
    top = tl.max(height, 0)
    factor = tl.exp(height - tl.where(top > float("-inf"), top, 0.0))
    parts = tl.load(part + (base + each)[:, None] * DV_BLOCK + dvs[None, :], mask=used[:, None], other=0.0)
    acc = tl.sum(factor[:, None] * parts, 0)
    total = tl.sum(factor * mine, 0)
    acc = tl.where(total > 0.0, acc / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out + seq * stride_ob + head * stride_oh + dvs, narrow(acc, out.dtype.element_ty), mask=dvs < DV)
