"""Kernels of a decode step of a few rows: linear layers together with what comes before and after them.

At a handful of rows a linear layer costs the reading of its weights, and a step the number of its kernels. So every
program asks for its weights first, which no kernel writes, and then waits for its rows; and it lets its successor
begin at once. A successor may therefore read only what is constant within a step before it waits: when it waits, all
kernels before it have waited and ended. A row of weights is read as two tiles, HEAD and TAIL columns, powers of two
that together are little more than its width. A row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.activation import combine_gate
from xkernels.ops._details.align import align_entries
from xkernels.ops._details.common import helper, narrow
from xkernels.ops._details.pdl import launch_dependents, wait_dependencies
from xkernels.ops._details.topk import choose_rows


@helper
def _tile(weight, n, cols, stride, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `n` of a weight matrix, BLOCK columns from START on."""
    k = START + tl.arange(0, BLOCK)
    mask = (n < cols)[:, None] & (k < WIDTH)[None, :]
    return tl.load(weight + n.to(tl.int64)[:, None] * stride + k[None, :], mask=mask, other=0.0)


@helper
def _vector(at, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """BLOCK values of a row from START on, in float32."""
    k = START + tl.arange(0, BLOCK)
    return tl.load(at + k, mask=k < WIDTH, other=0.0).to(tl.float32)


@helper
def _tiles(weight, n, cols, stride, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Both tiles of rows `n`; the second is not used where there is no TAIL."""
    head = _tile(weight, n, cols, stride, 0, HEAD, WIDTH)
    tail = head
    if TAIL > 0:
        tail = _tile(weight, n, cols, stride, HEAD, TAIL, WIDTH)
    return head, tail


@helper
def _vectors(at, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Both parts of a row, in float32; the second is not used where there is no TAIL."""
    head = _vector(at, 0, HEAD, WIDTH)
    tail = head
    if TAIL > 0:
        tail = _vector(at, HEAD, TAIL, WIDTH)
    return head, tail


@helper
def _residual(x, delta, stride_slot, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
              SLOTS: tl.constexpr):  # fmt: skip
    """Values of x + the sum of delta's slots, each sum rounded once as whoever stores it does."""
    value = _vector(x, START, BLOCK, WIDTH)
    if SLOTS > 0:
        added = _vector(delta, START, BLOCK, WIDTH)
        for slot in tl.static_range(1, SLOTS):
            added += _vector(delta + slot * stride_slot, START, BLOCK, WIDTH)
        added = narrow(added, delta.dtype.element_ty).to(tl.float32)
        value = narrow(value + added, x.dtype.element_ty).to(tl.float32)
    return value


@helper
def _residuals(at_x, at_d, stride_slot, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
               SLOTS: tl.constexpr):  # fmt: skip
    """Both parts of a row's `_residual`; the second is not used where there is no TAIL."""
    head = _residual(at_x, at_d, stride_slot, 0, HEAD, WIDTH, SLOTS)
    tail = head
    if TAIL > 0:
        tail = _residual(at_x, at_d, stride_slot, HEAD, TAIL, WIDTH, SLOTS)
    return head, tail


@helper
def _scale(head, tail, eps, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """1 / RMS of a row."""
    square = tl.sum(head * head, 0)
    if TAIL > 0:
        square += tl.sum(tail * tail, 0)
    return tl.rsqrt(square / WIDTH + eps)


@helper
def _dot(head, tail, w_head, w_tail, TAIL: tl.constexpr):
    """Products of one row with a program's rows of weights."""
    total = tl.sum(w_head.to(tl.float32) * head[None, :], 1)
    if TAIL > 0:
        total += tl.sum(w_tail.to(tl.float32) * tail[None, :], 1)
    return total


@helper
def _put(at, value, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Store BLOCK values of a row from START on."""
    k = START + tl.arange(0, BLOCK)
    tl.store(at + k, narrow(value, at.dtype.element_ty), mask=k < WIDTH)


@helper
def _put_row(at, head, tail, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Store both parts of a row."""
    _put(at, head, 0, HEAD, WIDTH)
    if TAIL > 0:
        _put(at, tail, HEAD, TAIL, WIDTH)


@triton.jit(do_not_specialize=["eps"])
def norm_linear(x, delta, gain, weight, bias, total, out, eps, cols, stride_x, stride_d, stride_slot, stride_w,
                WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out = norm(x + sum of delta's SLOTS) * gain @ weight.T + bias; the first program stores the sum."""
    launch_dependents(PDL)
    pid = tl.program_id(0)
    n = pid * COLS + tl.arange(0, COLS)
    w_head, w_tail = _tiles(weight, n, cols, stride_w, WIDTH, HEAD, TAIL)
    g_head, g_tail = _vectors(gain, WIDTH, HEAD, TAIL)
    offset = tl.zeros([COLS], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + n, mask=n < cols, other=0.0).to(tl.float32)
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        head, tail = _residuals(x + row * stride_x, delta + row * stride_d, stride_slot, WIDTH, HEAD, TAIL, SLOTS)
        product = _dot(head * g_head, tail * g_tail, w_head, w_tail, TAIL)
        result = product * _scale(head, tail, eps, WIDTH, TAIL) + offset
        tl.store(out + row * cols + n, narrow(result, out.dtype.element_ty), mask=n < cols)
        if SLOTS > 0:
            if pid == 0:
                _put_row(total + row * WIDTH, head, tail, WIDTH, HEAD, TAIL)


@triton.jit(do_not_specialize=["eps"])
def norm_rows(x, delta, gain, normed, eps, stride_x, stride_d, stride_slot, WIDTH: tl.constexpr, HEAD: tl.constexpr,
              TAIL: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row: normed = norm(x + sum of delta's SLOTS) * gain."""
    launch_dependents(PDL)
    row = tl.program_id(0)
    g_head, g_tail = _vectors(gain, WIDTH, HEAD, TAIL)
    wait_dependencies(PDL)
    head, tail = _residuals(x + row * stride_x, delta + row * stride_d, stride_slot, WIDTH, HEAD, TAIL, SLOTS)
    scale = _scale(head, tail, eps, WIDTH, TAIL)
    _put_row(normed + row * WIDTH, head * scale * g_head, tail * scale * g_tail, WIDTH, HEAD, TAIL)


@triton.jit
def row_logits(x, weight, out, cols, stride_x, stride_w, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
               ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """out = x @ weight.T, rounded to x's dtype and stored as out's."""
    launch_dependents(PDL)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    w_head, w_tail = _tiles(weight, n, cols, stride_w, WIDTH, HEAD, TAIL)
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        head, tail = _vectors(x + row * stride_x, WIDTH, HEAD, TAIL)
        result = narrow(_dot(head, tail, w_head, w_tail, TAIL), x.dtype.element_ty)
        tl.store(out + row * cols + n, result.to(out.dtype.element_ty), mask=n < cols)


@helper
def _route(pid, x, gain, router, normed, logits, eps, stride_x, stride_r, WIDTH: tl.constexpr, HEAD: tl.constexpr,
           TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EXPERTS: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """Logits of COLS experts in float32; the first program stores the normed rows."""
    n = pid * COLS + tl.arange(0, COLS)
    w_head, w_tail = _tiles(router, n, EXPERTS, stride_r, WIDTH, HEAD, TAIL)
    g_head, g_tail = _vectors(gain, WIDTH, HEAD, TAIL)
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        head, tail = _vectors(x + row * stride_x, WIDTH, HEAD, TAIL)
        scale = _scale(head, tail, eps, WIDTH, TAIL)
        head, tail = head * g_head, tail * g_tail
        tl.store(logits + row * EXPERTS + n, _dot(head, tail, w_head, w_tail, TAIL) * scale, mask=n < EXPERTS)
        if pid == 0:
            _put_row(normed + row * WIDTH, head * scale, tail * scale, WIDTH, HEAD, TAIL)


@helper
def _gate(part, x, gain, gate_up, gated, eps, inner, stride_x, stride_g, WIDTH: tl.constexpr, HEAD: tl.constexpr,
          TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """silu(gate) * up for COLS of the `inner` columns."""
    n = part * COLS + tl.arange(0, COLS)
    at_up = gate_up + inner.to(tl.int64) * stride_g
    gate_head, gate_tail = _tiles(gate_up, n, inner, stride_g, WIDTH, HEAD, TAIL)
    up_head, up_tail = _tiles(at_up, n, inner, stride_g, WIDTH, HEAD, TAIL)
    g_head, g_tail = _vectors(gain, WIDTH, HEAD, TAIL)
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        head, tail = _vectors(x + row * stride_x, WIDTH, HEAD, TAIL)
        scale = _scale(head, tail, eps, WIDTH, TAIL)
        head, tail = head * g_head, tail * g_tail
        gate = _dot(head, tail, gate_head, gate_tail, TAIL) * scale
        up = _dot(head, tail, up_head, up_tail, TAIL) * scale
        result = narrow(combine_gate(gate, up, "silu", 0.0, 0.0), gated.dtype.element_ty)
        tl.store(gated + row * inner + n, result, mask=n < inner)


@triton.jit(do_not_specialize=["eps"])
def norm_gate(x, gain, router, gate_up, normed, logits, gated, eps, inner, stride_x, stride_r, stride_g,
              WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
              EXPERTS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Of the normed rows: the router's logits (EXPERTS > 0) and beside them a gated projection (GATED)."""
    launch_dependents(PDL)
    pid = tl.program_id(0)
    FIRST: tl.constexpr = (EXPERTS + COLS - 1) // COLS
    if not GATED:
        _route(pid, x, gain, router, normed, logits, eps, stride_x, stride_r, WIDTH, HEAD, TAIL, ROWS, COLS, EXPERTS,
               PDL)  # fmt: skip
    elif EXPERTS == 0:
        _gate(pid, x, gain, gate_up, gated, eps, inner, stride_x, stride_g, WIDTH, HEAD, TAIL, ROWS, COLS, PDL)
    else:
        if pid < FIRST:
            _route(pid, x, gain, router, normed, logits, eps, stride_x, stride_r, WIDTH, HEAD, TAIL, ROWS, COLS,
                   EXPERTS, PDL)  # fmt: skip
        else:
            _gate(pid - FIRST, x, gain, gate_up, gated, eps, inner, stride_x, stride_g, WIDTH, HEAD, TAIL, ROWS, COLS,
                  PDL)  # fmt: skip


@helper
def _choose(logits, correction, weights, ids, sorted_ids, expert_ids, post, tokens, scale, cap, blocks,
            EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
            SCORING: tl.constexpr, RENORM: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr,
            TOP_GROUPS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Experts of all rows, and with BLOCK > 0 their entries sorted into blocks."""
    rows = tl.arange(0, MOST)
    slots = tl.arange(0, SLOTS)
    columns = tl.arange(0, COLUMNS)
    live = rows < tokens
    inside = (columns < EXPERTS)[None, :]
    at = logits + rows[:, None] * EXPERTS + columns[None, :]
    values = tl.load(at, mask=live[:, None] & inside, other=0.0)
    kept, chosen = choose_rows(values, correction, columns, inside, scale, EXPERTS, COLUMNS, MOST, TOPK, SLOTS,
                               SCORING, RENORM, BIASED, GROUPS, TOP_GROUPS, EPS)  # fmt: skip
    entry = rows[:, None] * TOPK + slots[None, :]
    mask = live[:, None] & (slots < TOPK)[None, :]
    tl.store(weights + entry, kept, mask=mask)
    tl.store(ids + entry, chosen, mask=mask)
    if BLOCK > 0:
        bucket = tl.reshape(tl.where(mask, chosen + 1, -1), [MOST * SLOTS])
        align_entries(bucket, tl.reshape(entry, [MOST * SLOTS]), sorted_ids, expert_ids, post, tokens * TOPK, cap,
                      blocks, BLOCK, MOST * SLOTS, FILL)  # fmt: skip


@helper
def _add(part, x, weight, residual, out, cols, stride_x, stride_w, stride_r, WIDTH: tl.constexpr, HEAD: tl.constexpr,
         TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """COLS columns of residual + x @ weight.T."""
    n = part * COLS + tl.arange(0, COLS)
    w_head, w_tail = _tiles(weight, n, cols, stride_w, WIDTH, HEAD, TAIL)
    wait_dependencies(PDL)
    for row in tl.static_range(ROWS):
        head, tail = _vectors(x + row * stride_x, WIDTH, HEAD, TAIL)
        before = tl.load(residual + row * stride_r + n, mask=n < cols, other=0.0).to(tl.float32)
        result = before + _dot(head, tail, w_head, w_tail, TAIL)
        tl.store(out + row * cols + n, narrow(result, out.dtype.element_ty), mask=n < cols)


@triton.jit(do_not_specialize=["tokens", "scale", "cap", "blocks"])
def choose_add(logits, correction, weights, ids, sorted_ids, expert_ids, post, x, weight, residual, out, tokens, scale,
               cap, blocks, cols, stride_x, stride_w, stride_r, WIDTH: tl.constexpr, HEAD: tl.constexpr,
               TAIL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHOOSE: tl.constexpr, ADD: tl.constexpr,
               EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, TOPK: tl.constexpr,
               SLOTS: tl.constexpr, SCORING: tl.constexpr, RENORM: tl.constexpr, BIASED: tl.constexpr,
               GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
               FILL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The first program chooses experts (CHOOSE); the others add a linear layer to the residual (ADD)."""
    launch_dependents(PDL)
    pid = tl.program_id(0)
    if not CHOOSE:
        _add(pid, x, weight, residual, out, cols, stride_x, stride_w, stride_r, WIDTH, HEAD, TAIL, ROWS, COLS, PDL)
    elif not ADD:
        wait_dependencies(PDL)
        _choose(logits, correction, weights, ids, sorted_ids, expert_ids, post, tokens, scale, cap, blocks, EXPERTS,
                COLUMNS, MOST, TOPK, SLOTS, SCORING, RENORM, BIASED, GROUPS, TOP_GROUPS, EPS, BLOCK,
                FILL)  # fmt: skip
    else:
        if pid == 0:
            wait_dependencies(PDL)
            _choose(logits, correction, weights, ids, sorted_ids, expert_ids, post, tokens, scale, cap, blocks,
                    EXPERTS, COLUMNS, MOST, TOPK, SLOTS, SCORING, RENORM, BIASED, GROUPS, TOP_GROUPS, EPS, BLOCK,
                    FILL)  # fmt: skip
        else:
            _add(pid - 1, x, weight, residual, out, cols, stride_x, stride_w, stride_r, WIDTH, HEAD, TAIL, ROWS, COLS,
                 PDL)  # fmt: skip
