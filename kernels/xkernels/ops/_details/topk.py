"""Kernel of the expert choice."""

from __future__ import annotations

import triton
import triton.language as tl

from xkernels.ops._details.common import helper


@helper
def _log_of_one_plus(e):
    """log(1 + e) for e of [0, 1], to float32's precision also where 1 + e is 1: 2 artanh(e / (2 + e)), as a series."""
    twice = e / (1.0 + 0.5 * e)
    t = 0.25 * twice * twice  # at most 1/9, and each term has one factor more
    tail = 1.0 / 11 + t * (1.0 / 13 + t * (1.0 / 15))
    tail = 1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9 + t * tail))
    return twice * (1.0 + t * (1.0 / 3 + t * tail))


@helper
def _scores(logits, inside, SCORING: tl.constexpr):
    """Scores in float32 of [ROWS, COLUMNS] logits; columns outside get minus infinity."""
    if SCORING == "softmax":
        logits = tl.where(inside, logits, float("-inf"))
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = e / tl.sum(e, 1)[:, None]
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        # log(1 + exp(x)) without overflow
        score = tl.sqrt(tl.maximum(logits, 0.0) + _log_of_one_plus(tl.exp(-tl.abs(logits))))
    return score


@helper
def _ordered(bits):
    """Bits of float32 as integers of the same order, and back: the rule is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@helper
def _first_max(values, columns, COLUMNS: tl.constexpr):
    """Largest value of each row and the first column that holds it; integers are what a warp reduces at once."""
    keys = _ordered(values.to(tl.int32, bitcast=True))
    top = tl.max(keys, 1)
    at = tl.min(tl.where(keys == top[:, None], columns[None, :], COLUMNS), 1)
    return _ordered(top).to(tl.float32, bitcast=True), at


@helper
def _keep_groups(choice, columns, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
                 GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr):  # fmt: skip
    """Minus infinity for the columns of all but the best groups."""
    group_of = columns // (EXPERTS // GROUPS)
    score = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)  # each column: its group's score
    for g in tl.static_range(GROUPS):
        mine = tl.where((group_of == g)[None, :], choice, float("-inf"))
        best, at = _first_max(mine, columns, COLUMNS)
        if PAIR and EXPERTS // GROUPS > 1:
            best += tl.max(tl.where(columns[None, :] == at[:, None], float("-inf"), mine), 1)
        score = tl.where((group_of == g)[None, :], best[:, None], score)
    kept = tl.zeros([ROWS, COLUMNS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best, at = _first_max(score, columns, COLUMNS)
        chosen = group_of[None, :] == (at // (EXPERTS // GROUPS))[:, None]
        kept = tl.where(chosen, 1, kept)
        score = tl.where(chosen, float("-inf"), score)
    return tl.where(kept > 0, choice, float("-inf"))


@helper
def choose_rows(logits, bias_ptr, columns, inside, scale, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
                ROWS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr, SCORING: tl.constexpr,
                RENORM: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                EPS: tl.constexpr):  # fmt: skip
    """Weights and ids [ROWS, SLOTS] of [ROWS, COLUMNS] logits; the first TOPK of SLOTS are used."""
    score = _scores(logits, inside, SCORING)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias_ptr + columns, mask=columns < EXPERTS, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _keep_groups(choice, columns, EXPERTS, COLUMNS, ROWS, GROUPS, TOP_GROUPS, HAS_BIAS)
    # weights stay in registers until they are final: a program's threads do not see each other's stores
    slots = tl.arange(0, SLOTS)
    kept = tl.zeros([ROWS, SLOTS], tl.float32)
    chosen = tl.zeros([ROWS, SLOTS], tl.int32)
    for slot in tl.static_range(TOPK):
        weight, best = _first_max(choice, columns, COLUMNS)
        best = tl.minimum(best, EXPERTS - 1)  # a NaN with a sign is below the columns that no expert has
        hit = columns[None, :] == best[:, None]
        if HAS_BIAS:
            weight = tl.sum(tl.where(hit, score, 0.0), 1)
        kept = tl.where((slots == slot)[None, :], weight[:, None], kept)
        chosen = tl.where((slots == slot)[None, :], best[:, None], chosen)
        choice = tl.where(hit, float("-inf"), choice)
    factor = tl.zeros([ROWS], tl.float32) + scale
    if RENORM:
        factor = scale / (tl.sum(kept, 1) + EPS)
    return kept * factor[:, None], chosen


@triton.jit(do_not_specialize=["tokens", "scale", "shared_weight"])
def choose(logits_ptr, bias_ptr, weights_ptr, ids_ptr, tokens, stride_row, stride_col, scale, shared_weight,
           EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOPK: tl.constexpr, SLOTS: tl.constexpr,
           WIDTH: tl.constexpr, SCORING: tl.constexpr, RENORM: tl.constexpr, HAS_BIAS: tl.constexpr,
           GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """ROWS tokens: score, keep the best groups, take the best expert TOPK times."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    slots = tl.arange(0, SLOTS)
    inside = (columns < EXPERTS)[None, :]
    live = rows < tokens
    at = logits_ptr + rows.to(tl.int64)[:, None] * stride_row + columns[None, :] * stride_col
    logits = tl.load(at, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    kept, chosen = choose_rows(logits, bias_ptr, columns, inside, scale, EXPERTS, COLUMNS, ROWS, TOPK, SLOTS, SCORING,
                               RENORM, HAS_BIAS, GROUPS, TOP_GROUPS, EPS)  # fmt: skip
    out_at = rows.to(tl.int64) * WIDTH
    at = out_at[:, None] + slots[None, :]
    mask = live[:, None] & (slots < TOPK)[None, :]
    tl.store(weights_ptr + at, kept, mask=mask)
    tl.store(ids_ptr + at, chosen, mask=mask)
    for slot in tl.static_range(TOPK, WIDTH):
        tl.store(ids_ptr + out_at + slot, tl.zeros([ROWS], tl.int32) + (EXPERTS + slot - TOPK), mask=live)
        tl.store(weights_ptr + out_at + slot, tl.zeros([ROWS], tl.float32) + shared_weight, mask=live)


@triton.jit
def router_dot(x, weight, out, width, stride_x, stride_w, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Logits of one token for ROWS experts, in float32."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
        mask = (experts < EXPERTS)[:, None] & (cols < width)[None, :]
        acc += tl.load(weight + experts[:, None] * stride_w + cols[None, :], mask=mask, other=0.0) * value[None, :]
    tl.store(out + token * EXPERTS + experts, tl.sum(acc, 1), mask=experts < EXPERTS)
