"""The two projections of a mixture-of-experts layer for a token or two: products of weight rows with single vectors.

A block of the alignment is one entry here (BLOCK_SIZE_M 1), so there is nothing for a matrix unit: a program takes
some weight rows of one entry's expert and multiplies and adds in float32, and reading the weights is all that it
costs. A row is walked in chunks of BLOCK_K columns. The up projection's chunks come through shared memory, STAGES of
them under way. The down projection's programs ask for their first AHEAD chunks before they wait for the up
projection, and hold them in registers: so weights of both are read at once, and where every chunk is held, only the
vector is read after the wait.

A vector's values are loaded SPAN times, as the weights of SPAN rows are, so that each thread has the columns that it
has of the weights: no value ever moves between threads before the sums. SCHEME is as in `moe_gemm`; FP8 vectors of
weights with block scales are rounded group by group where they are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.common import helper, narrow
from xkernels.ops._details.mxfp4 import unpack
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies
from xkernels.ops._details.quant import quant_rows

_REST = tl.constexpr(3)  # stages of the down projection's chunks that are not held


@helper
def _chunk(w, w_scale, rows, live, k, stride_wn, stride_wsn, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
           VEC: tl.constexpr, SCHEME: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Weights [ROWS, BLOCK_K] of an expert (`w`, `w_scale`: its first) from column k on."""
    PACK: tl.constexpr = 2 if SCHEME == "mxfp4" else 1
    ks = k // PACK + tl.arange(0, BLOCK_K // PACK)
    mask = live[:, None]
    if WIDTH % BLOCK_K != 0:
        mask = mask & (ks < WIDTH // PACK)[None, :]
    # A thread loads as many columns of the weights as of the vector.
    at = tl.max_contiguous(w + rows[:, None] * stride_wn + ks[None, :], [1, VEC])
    tile = tl.load(at, mask=mask, other=0.0)
    if SCHEME == "mxfp4":
        groups = k // 32 + tl.arange(0, BLOCK_K // 32)
        mask = live[:, None] & (groups < WIDTH // 32)[None, :]
        scales = tl.load(w_scale + rows[:, None] * stride_wsn + groups[None, :], mask=mask, other=0)
        tile = unpack(tile, scales, dtype, rows.shape[0], BLOCK_K)
    return tile


@helper
def _vector(x, k, stride_xk, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr):
    """Values [SPAN, BLOCK_K] of a row from column k on, as they are stored.

    SPAN times the same: so every thread has the columns that it has of the weights.
    """
    ks = k + tl.arange(0, BLOCK_K)[None, :] + tl.zeros([SPAN, 1], tl.int32)
    if WIDTH % BLOCK_K == 0:
        return tl.load(x + ks * stride_xk)
    return tl.load(x + ks * stride_xk, mask=ks < WIDTH, other=0.0)


@helper
def _float(x, dtype: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr, SCHEME: tl.constexpr):
    """A chunk of a row as it is multiplied: with block scales rounded to FP8 in groups."""
    x = x.to(tl.float32)
    if SCHEME == "block":
        SPAN: tl.constexpr = x.shape[0]
        q, s = quant_rows(tl.reshape(x, (SPAN * (BLOCK_K // GROUP_K), GROUP_K)), dtype)
        x = tl.reshape(q.to(tl.float32) * s[:, None], (SPAN, BLOCK_K))
    return x


@helper
def _scaled(x, w_scale, n, k, stride_wsn, stride_wsk, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP_N: tl.constexpr, GROUP_K: tl.constexpr):  # fmt: skip
    """A chunk of a row times the scales of the blocks that weight row n lies in."""
    SPAN: tl.constexpr = x.shape[0]
    groups = k // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K)
    at = w_scale + (n // GROUP_N) * stride_wsn + groups * stride_wsk
    s = tl.load(at, mask=groups * GROUP_K < WIDTH, other=0.0)
    x = tl.reshape(x, (SPAN, BLOCK_K // GROUP_K, GROUP_K)) * s[None, :, None]
    return tl.reshape(x, (SPAN, BLOCK_K))


@helper
def _add(acc, tile, x, w_scale, n, rows, live, k, stride_wsn, stride_wsk, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
         VEC: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCHEME: tl.constexpr,
         SCALES: tl.constexpr):  # fmt: skip
    """acc [ROWS / SPAN, SPAN, BLOCK_K / VEC] + the products of a chunk, VEC columns of a thread added up.

    x: [SPAN, BLOCK_K] float32. SCALES: `one` (the rows share the block scales of n, their first) or `each`.
    """
    SPAN: tl.constexpr = x.shape[0]
    MANY: tl.constexpr = rows.shape[0] // SPAN
    if SCHEME == "block" and SCALES == "one":
        x = _scaled(x, w_scale, n, k, stride_wsn, stride_wsk, WIDTH, BLOCK_K, GROUP_N, GROUP_K)
    products = tl.reshape(tile, (MANY, SPAN, BLOCK_K)).to(tl.float32) * tl.reshape(x, (1, SPAN, BLOCK_K))
    part = tl.sum(tl.reshape(products, (MANY, SPAN, BLOCK_K // VEC, VEC)), 3)
    if SCHEME == "block" and SCALES == "each":
        ks = k + tl.arange(0, BLOCK_K // VEC) * VEC
        at = w_scale + (rows // GROUP_N)[:, None] * stride_wsn + (ks // GROUP_K)[None, :] * stride_wsk
        s = tl.load(at, mask=live[:, None] & (ks < WIDTH)[None, :], other=0.0)
        part *= tl.reshape(s, (MANY, SPAN, BLOCK_K // VEC))
    return acc + part


@helper
def _entry(post, experts, sorted_ids, entry):
    """Expert (-2: nobody's) and flat index of an entry."""
    expert = tl.load(experts + entry)
    slot = tl.load(sorted_ids + entry)
    return tl.where(entry < tl.load(post), expert, -2), slot


@helper
def _pair(w, w_scale, gates, live, k, stride_wn, stride_wsn, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
          VEC: tl.constexpr, SCHEME: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """A chunk of gate rows and the one of their up rows."""
    gate = _chunk(w, w_scale, gates, live, k, stride_wn, stride_wsn, WIDTH, BLOCK_K, VEC, SCHEME, dtype)
    up = _chunk(w, w_scale, gates + 8, live, k, stride_wn, stride_wsn, WIDTH, BLOCK_K, VEC, SCHEME, dtype)
    return gate, up


@helper
def _add_pair(gate, up, pair, x, w_scale, n, gates, live, k, stride_wsn, stride_wsk, dtype: tl.constexpr,
              WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr, GROUP_N: tl.constexpr,
              GROUP_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Both sums with the products of a chunk."""
    v = _float(x, dtype, BLOCK_K, GROUP_K, SCHEME)
    gate = _add(gate, pair[0], v, w_scale, n, gates, live, k, stride_wsn, stride_wsk, WIDTH, BLOCK_K, VEC, GROUP_N,
                GROUP_K, SCHEME, SCALES)  # fmt: skip
    up = _add(up, pair[1], v, w_scale, n + 8, gates + 8, live, k, stride_wsn, stride_wsk, WIDTH, BLOCK_K, VEC, GROUP_N,
              GROUP_K, SCHEME, SCALES)  # fmt: skip
    return gate, up


@helper
def _finish(acc, x_scale, w_scale, bias, factor, rows, live, stride_wsn, SCHEME: tl.constexpr, HAS_BIAS: tl.constexpr,
            MUL_INPUT: tl.constexpr):  # fmt: skip
    """Sums of rows [ROWS], with row scales and bias; MUL_INPUT: `factor` multiplies the input, before the bias."""
    result = tl.reshape(tl.sum(acc, 2), (rows.shape[0],))
    if SCHEME == "row":
        result *= tl.load(w_scale + rows * stride_wsn, mask=live, other=0.0) * tl.load(x_scale)
    if MUL_INPUT:
        result *= factor
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    return result


@triton.jit(do_not_specialize=["topk"])
def up_rows(x, x_scale, w, w_scale, bias, out, weight, sorted_ids, experts, post, topk, N2, stride_xm, stride_xk,
            stride_xsm, stride_we, stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out, WIDTH: tl.constexpr,
            BLOCK_N: tl.constexpr, SPAN: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr,
            GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
            HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr, READY: tl.constexpr,
            ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """out[entry] = activation(x[token of entry] @ w[expert].T + bias[expert]); N2 counts interleaved weight rows.

    READY: the alignment is complete before this kernel starts.
    """
    ROWS: tl.constexpr = BLOCK_N // 2
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    KIND: tl.constexpr = w.dtype.element_ty
    dtype: tl.constexpr = x.dtype.element_ty
    num_n = (N2 + BLOCK_N - 1) // BLOCK_N
    entry = tl.program_id(0) // num_n
    first = (tl.program_id(0) % num_n) * ROWS
    cols = first + tl.arange(0, ROWS)
    n = 2 * first
    if READY:
        expert, slot = _entry(post, experts, sorted_ids, entry)
    wait_dependencies(PDL)
    launch_dependents(PDL)
    if not READY:
        expert, slot = _entry(post, experts, sorted_ids, entry)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    w += expert * stride_we
    if SCHEME != "none":
        w_scale += expert * stride_wse
    token = (slot // topk).to(tl.int64)
    x += token * stride_xm
    gates = (cols // 8 * 16 + cols % 8).to(tl.int64)
    live = gates < N2
    gate = tl.zeros([ROWS // SPAN, SPAN, BLOCK_K // VEC], tl.float32)
    up = tl.zeros([ROWS // SPAN, SPAN, BLOCK_K // VEC], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = step * BLOCK_K
        pair = _pair(w, w_scale, gates, live, k, stride_wn, stride_wsn, WIDTH, BLOCK_K, VEC, SCHEME, dtype)
        value = _vector(x, k, stride_xk, WIDTH, BLOCK_K, SPAN)
        gate, up = _add_pair(gate, up, pair, value, w_scale, n, gates, live, k, stride_wsn, stride_wsk, KIND, WIDTH,
                             BLOCK_K, VEC, GROUP_N, GROUP_K, SCHEME, SCALES)  # fmt: skip
    if SCHEME == "row":
        x_scale += token * stride_xsm
    if HAS_BIAS:
        bias += expert * N2
    factor = 0.0
    if MUL_WEIGHT:
        factor = tl.load(weight + slot)
    gate = _finish(gate, x_scale, w_scale, bias, factor, gates, live, stride_wsn, SCHEME, HAS_BIAS, MUL_WEIGHT)
    up = _finish(up, x_scale, w_scale, bias, factor, gates + 8, live, stride_wsn, SCHEME, HAS_BIAS, MUL_WEIGHT)
    result = narrow(combine_gate(gate, up, ACT, ALPHA, LIMIT), out.dtype.element_ty)
    tl.store(out + entry.to(tl.int64) * stride_out + cols, result, mask=live)


@triton.jit
def down_rows(h, h_scale, w, w_scale, bias, out, weight, sorted_ids, experts, post, N, stride_h, stride_hsm, stride_we,
              stride_wn, stride_wse, stride_wsn, stride_wsk, stride_out, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
              SPAN: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr, AHEAD: tl.constexpr,
              GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, SCHEME: tl.constexpr, SCALES: tl.constexpr,
              HAS_BIAS: tl.constexpr, MUL_WEIGHT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out[token, slot] = (h[entry] @ w[expert].T + bias[expert]) * router weight; zeros where there is no expert.

    The alignment is older than the predecessor, which has waited: it may be read before waiting.
    """
    STEPS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    FIRST: tl.constexpr = AHEAD if AHEAD < STEPS else STEPS
    KIND: tl.constexpr = w.dtype.element_ty
    dtype: tl.constexpr = out.dtype.element_ty
    num_n = (N + BLOCK_N - 1) // BLOCK_N
    entry = tl.program_id(0) // num_n
    n = (tl.program_id(0) % num_n) * BLOCK_N
    rows = (n + tl.arange(0, BLOCK_N)).to(tl.int64)
    expert, slot = _entry(post, experts, sorted_ids, entry)
    used = expert >= -1
    there = expert >= 0
    live = (rows < N) & there
    expert = tl.maximum(expert, 0).to(tl.int64)
    w += expert * stride_we
    if SCHEME != "none":
        w_scale += expert * stride_wse
    tiles = ()
    for step in tl.static_range(FIRST):
        tile = _chunk(w, w_scale, rows, live, step * BLOCK_K, stride_wn, stride_wsn, WIDTH, BLOCK_K, VEC, SCHEME, dtype)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    factor = 1.0
    if MUL_WEIGHT:
        factor = tl.load(weight + slot, mask=there, other=0.0)
    if HAS_BIAS:
        bias += expert * N
    h += entry.to(tl.int64) * stride_h
    if SCHEME == "row":
        h_scale += entry * stride_hsm
    wait_dependencies(PDL)
    launch_dependents(PDL)
    values = ()
    for step in tl.static_range(FIRST):
        values = values + (_vector(h, step * BLOCK_K, 1, WIDTH, BLOCK_K, SPAN),)  # type: ignore[assignment]
    acc = tl.zeros([BLOCK_N // SPAN, SPAN, BLOCK_K // VEC], tl.float32)
    for step in tl.static_range(FIRST):
        v = _float(values[step], KIND, BLOCK_K, GROUP_K, SCHEME)
        acc = _add(acc, tiles[step], v, w_scale, n, rows, live, step * BLOCK_K, stride_wsn, stride_wsk, WIDTH, BLOCK_K,
                   VEC, GROUP_N, GROUP_K, SCHEME, SCALES)  # fmt: skip
    for step in tl.range(FIRST, STEPS, num_stages=_REST):
        k = step * BLOCK_K
        tile = _chunk(w, w_scale, rows, live, k, stride_wn, stride_wsn, WIDTH, BLOCK_K, VEC, SCHEME, dtype)
        v = _float(_vector(h, k, 1, WIDTH, BLOCK_K, SPAN), KIND, BLOCK_K, GROUP_K, SCHEME)
        acc = _add(acc, tile, v, w_scale, n, rows, live, k, stride_wsn, stride_wsk, WIDTH, BLOCK_K, VEC, GROUP_N,
                   GROUP_K, SCHEME, SCALES)  # fmt: skip
    result = _finish(acc, h_scale, w_scale, bias, 1.0, rows, live, stride_wsn, SCHEME, HAS_BIAS, False)
    result = narrow(tl.where(live, result * factor, 0.0), dtype)
    tl.store(out + slot.to(tl.int64) * stride_out + rows, result, mask=(rows < N) & used)
