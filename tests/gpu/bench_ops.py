"""Memory-bound operators against copy bandwidth, alignment against torch, scaled_mm against our Triton FP8 linear.

PYTHONPATH=.:kernels python tests/gpu/bench_ops.py --out OUT.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from xkernels.device import live
from xkernels.ops.align import moe_align_block_size
from xkernels.ops.kv_cache import store_kv_cache
from xkernels.ops.linear import block_fp8_linear, block_fp8_linear_reference, prepare_block_fp8, scaled_mm_refusal
from xkernels.ops.quant import per_token_group_quant_fp8
from xkernels.ops.reduce import moe_sum_reduce

DEV = live()
DEVICE = DEV.torch_device()
TOKENS = (1, 16, 64, 128, 512, 1024, 4096)
LINEAR_SHAPES = ((4096, 4096), (7168, 2048), (2560, 1280))
TILES = {
    64: [(16, 64, 4, 5), (16, 128, 4, 4), (64, 64, 4, 4)],
    512: [(64, 64, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3)],
    4096: [(64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3)],
}


def time_us(calls: list[Callable[[], Any]], rounds: int = 7) -> float:
    """Median device microseconds per call; the calls should rotate over inputs larger than the L2 together."""
    calls[0]()
    graph = DEV.capture(lambda: [call() for call in calls], warmups=1)
    assert graph is not None
    times = []
    for _ in range(rounds):
        a, b = DEV.event(), DEV.event()
        a.record()
        graph.replay()
        b.record()
        times.append(a.elapsed_ms(b) * 1e3 / len(calls))
    return statistics.median(times)


def rates() -> list[dict[str, Any]]:
    """GB/s of quantisation, KV store and combine beside a copy of as many bytes."""
    out = []
    for rows, k in ((8192, 4096), (32768, 4096)):
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        q, s = per_token_group_quant_fp8(x, 128)
        moved = x.nbytes + q.nbytes + s.nbytes
        for kw in (
            {},
            {"column_major": True, "tma_aligned": True},
            {"column_major": True, "tma_aligned": True, "ue8m0": True},
        ):
            us = time_us([partial(per_token_group_quant_fp8, x, 128, **kw)] * 4)
            out.append(rate("per_token_group_quant_fp8", f"{rows}x{k} {'-'.join(kw)}", moved, us))
        us = time_us([partial(per_token_group_quant_fp8, x, k)] * 4)
        out.append(rate("scaled_fp8_quant per token", f"{rows}x{k}", x.nbytes + q.nbytes, us))
    for tokens, width in ((32768, 1024), (65536, 1024), (65536, 576)):
        kv = [torch.randn(tokens, width, device=DEVICE).bfloat16() for _ in range(2)]
        caches = [torch.zeros(tokens + 1, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        at = (torch.randperm(tokens, device=DEVICE) + 1).int()
        for split in (0, 2):
            us = time_us([partial(store_kv_cache, *kv, *caches, at, num_split=split)] * 4)
            out.append(rate("store_kv_cache", f"{tokens}x{width} split {split}", 4 * kv[0].nbytes + at.nbytes, us))
    x = torch.randn(4096, 6, 1280, device=DEVICE).bfloat16()
    out.append(rate("moe_sum_reduce", "4096x6x1280", x.nbytes * 7 // 6, time_us([lambda: moe_sum_reduce(x)] * 4)))
    return out


def rate(name: str, case: str, moved: int, us: float) -> dict[str, Any]:
    """One row, with the time of a copy that moves as many bytes."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = time_us([lambda: target.copy_(source)] * 4)
    row = {"op": name, "case": case, "us": us, "GBps": moved / us / 1e3, "copy_us": copy, "of_copy": copy / us}
    print(f"{name} {case}: {us:.1f} us, {row['GBps']:.0f} GB/s, {row['of_copy']:.2f} of copy", flush=True)
    return row


def torch_align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, ...]:
    """The same in torch operations, without a host synchronisation."""
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + block - 1) // block * block
    ends, starts = padded.cumsum(0), counts.cumsum(0) - counts
    cap = flat.numel() + (experts + 1) * (block - 1)
    out = torch.full((cap,), flat.numel(), dtype=torch.int32, device=ids.device)
    expert = flat[order]
    out[(ends - padded)[expert] + torch.arange(flat.numel(), device=ids.device) - starts[expert]] = order.int()
    at = torch.arange(cap // block + 1, device=ids.device) * block
    return out, torch.searchsorted(ends, at, right=True).int(), ends[-1:].int()


def alignments() -> list[dict[str, Any]]:
    """Our alignment beside torch's operations."""
    out = []
    for experts, topk in ((64, 6), (128, 8), (256, 8)):
        for m in TOKENS:
            ids = torch.stack([torch.randperm(experts, device=DEVICE)[:topk] for _ in range(min(m, 64))]).int()
            ids = ids.repeat(m // ids.shape[0], 1)
            ours = time_us([lambda ids=ids, e=experts: moe_align_block_size(ids, 64, e)] * 4)
            theirs = time_us([lambda ids=ids, e=experts: torch_align(ids, 64, e)] * 4)
            out.append({"experts": experts, "topk": topk, "m": m, "us": ours, "torch_us": theirs})
    text = ", ".join(f"{r['experts']}/{r['m']}: {r['us']:.1f} vs {r['torch_us']:.1f}" for r in out)
    print("align us ours vs torch:", text, flush=True)
    return out


def linears() -> list[dict[str, Any]]:
    """scaled_mm and our Triton kernel on the same quantised activations, cold weights."""
    refusal = scaled_mm_refusal(DEVICE)
    print("scaled_mm:", refusal or "serves block scales here", flush=True)
    out = []
    for n, k in LINEAR_SHAPES:
        sets = []
        for _ in range(8):
            w = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
            s = torch.rand(-(-n // 128), k // 128, device=DEVICE)
            sets.append([prepare_block_fp8(w, s, (128, 128), layout=kind) for kind in ("row_major", "scaled_mm")])
        for m in TOKENS:
            out.append(linear_row(m, n, k, sets, refusal))
    return out


def linear_row(m: int, n: int, k: int, sets: list[Any], refusal: str | None) -> dict[str, Any]:
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    want = block_fp8_linear_reference(x.float(), sets[0][0])
    rq, rs = per_token_group_quant_fp8(x, 128)
    cq, cs = per_token_group_quant_fp8(x, 128, column_major=True)
    row: dict[str, Any] = {"m": m, "n": n, "k": k}
    if refusal is None:
        kw: dict[str, Any] = {"backend": "scaled_mm", "x_scale": cs, "out_dtype": torch.bfloat16}
        row["scaled_mm_us"] = time_us([lambda p=p: block_fp8_linear(cq, p[1], **kw) for p in sets])
        row["scaled_mm_error"] = relative(block_fp8_linear(cq, sets[0][1], **kw), want)
    for tile in TILES[min(limit for limit in TILES if m <= limit)]:
        for tma in (False, True):
            config = {"BLOCK_SIZE_M": tile[0], "BLOCK_SIZE_N": tile[1], "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8,
                      "num_warps": tile[2], "num_stages": tile[3], "USE_TMA": tma}  # fmt: skip
            kw = {"backend": "triton", "x_scale": rs, "out_dtype": torch.bfloat16, "config": config}
            us = time_us([lambda p=p, kw=kw: block_fp8_linear(rq, p[0], **kw) for p in sets])
            if us < row.get("triton_us", 1e9):
                row |= {"triton_us": us, "config": config}
                row["triton_error"] = relative(block_fp8_linear(rq, sets[0][0], **kw), want)
    print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items() if key != "config"},
          "-".join(map(str, row["config"].values())), flush=True)  # fmt: skip
    return row


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=("rates", "align", "linear"), default=["rates", "align", "linear"])
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": DEV.identity().name, "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv),
    }  # fmt: skip
    for name, measure in (("rates", rates), ("align", alignments), ("linear", linears)):
        if name in args.only:
            result[name] = measure()
        args.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
