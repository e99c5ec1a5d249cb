"""MoE GEMMs side by side with SGLang's kernels on one GPU: correctness first, then times, then a table and JSON.

    PYTHONPATH=.:kernels python tests/gpu/bench_moe.py --mode bf16 --out $OUT/moe.json

Both kernels get the same weights, routing, alignment and candidate configs and each keeps its best config per batch
size; the chain (up GEMM, activation, down GEMM, combine) is then timed for both in turns, in device graphs whose calls
rotate over copies of the weights so that the L2 is cold. Floor: bytes / 4.3 TB/s or flop / 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

import anchor

from xkernels.device import live
from xkernels.ops._details import experts as ours
from xkernels.ops.align import Alignment
from xkernels.ops.fused_experts import fused_experts_reference, prepare_experts
from xkernels.ops.quant import per_token_group_quant_fp8
from xkernels.ops.scheme import Scheme

SHAPES = {"E64": (64, 6, 1280, 896), "E128": (128, 8, 2048, 768)}
TOKENS = (1, 16, 64, 128, 512, 1024, 4096)
DEV = live()
INNER = 8
# Candidates by batch size, for both kernels: what won in an earlier sweep of twice as many, and its neighbours.
BF16 = {
    16: [(16, 32, 128, 4, 4), (16, 64, 64, 4, 4), (16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 128, 128, 4, 3),
         (16, 128, 128, 8, 3), (16, 32, 256, 4, 3), (16, 64, 256, 4, 3)],
    128: [(16, 64, 128, 4, 3), (16, 128, 128, 4, 3), (16, 128, 128, 8, 2), (32, 128, 128, 4, 2)],
    512: [(64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 4), (64, 128, 128, 4, 3)],
    4096: [(128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 5), (64, 256, 64, 8, 4)],
}  # fmt: skip
FP8 = {
    16: [(16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 128, 128, 4, 3), (16, 128, 128, 4, 4),
         (16, 128, 128, 8, 4)],
    128: [(16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (16, 128, 128, 4, 4), (32, 128, 128, 4, 3)],
    512: [(64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (64, 128, 128, 4, 4), (64, 256, 128, 8, 3)],
    4096: [(64, 128, 128, 4, 3), (64, 128, 128, 4, 4), (128, 128, 128, 8, 3), (64, 256, 128, 8, 3)],
}  # fmt: skip


def configs(mode: str, m: int) -> list[dict[str, Any]]:
    """Candidates of one batch size; without descriptors too where those did not always win."""
    table = BF16 if mode == "bf16" else FP8
    rows = table[min(limit for limit in table if m <= limit)]
    return [
        {"BLOCK_SIZE_M": c[0], "BLOCK_SIZE_N": c[1], "BLOCK_SIZE_K": c[2], "GROUP_SIZE_M": 1 if m < 512 else 16,
         "num_warps": c[3], "num_stages": c[4], "USE_TMA": tma}
        for c in rows for tma in ((False, True) if m == 1 else (True,))
    ]  # fmt: skip


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, R, C] -> FP8 and float32 scales of 128 x 128 blocks."""
    e, r, c = w.shape
    blocks = w.float().view(e, r // 128, 128, c // 128, 128)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-10) / 448
    q = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view(w.shape)
    return q, scale


class Problem:
    """One shape and mode: weight copies for both kernels, inputs and routings."""

    def __init__(self, shape: str, mode: str, copies: int = 4, experts: int | None = None) -> None:
        self.E, self.topk, self.H, self.N = SHAPES[shape]
        self.E = experts or self.E
        self.topk = min(self.topk, self.E) if experts is None else self.topk
        self.mode, self.device = mode, DEV.torch_device()
        self.sets = []
        for copy in range(copies):
            g = torch.Generator(device=self.device).manual_seed(copy)
            kw = {"device": self.device, "dtype": torch.bfloat16, "generator": g}
            w1 = torch.randn(self.E, 2 * self.N, self.H, **kw) / 16
            w2 = torch.randn(self.E, self.H, self.N, **kw) / 16
            s1 = s2 = None
            scheme = Scheme()
            if mode == "fp8":
                (w1, s1), (w2, s2) = quantize_blocks(w1), quantize_blocks(w2)
                scheme = Scheme("fp8_block", (128, 128))
            p = prepare_experts(w1, w2, scheme=scheme, w1_scale=s1, w2_scale=s2)
            self.sets.append(({"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2}, p))

    def inputs(self, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator(device=self.device).manual_seed(1000 + seed)
        x = torch.randn(m, self.H, device=self.device, dtype=torch.bfloat16, generator=g) / 8
        logits = torch.randn(m, max(self.E, self.topk), device=self.device, generator=g)
        weights, ids = torch.topk(torch.softmax(logits, -1), self.topk, -1)
        return x, weights.contiguous(), (ids % self.E).int()

    def floor_us(self, m: int, part: str) -> float:
        used = statistics.mean(self.inputs(m, s)[2].unique().numel() for s in range(INNER))
        size = 1 if self.mode == "fp8" else 2
        slots, rate = m * self.topk, 790e12 * (2 if self.mode == "fp8" else 1)
        up = (used * 2 * self.N * self.H * size + m * self.H * 2 + slots * self.N * 2, 4 * slots * self.N * self.H)
        down = (used * self.N * self.H * size + slots * (self.N + self.H) * 2, 2 * slots * self.N * self.H)
        return (
            sum(max(b / 4.3e12, f / rate) for n, (b, f) in {"up": up, "down": down}.items() if part in (n, "both"))
            * 1e6
        )


def align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact-length alignment, the same for both kernels."""
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + block - 1) // block * block
    ends, starts = padded.cumsum(0), counts.cumsum(0) - counts
    total = int(ends[-1])
    out = torch.full((total,), flat.numel(), dtype=torch.int32, device=ids.device)
    expert = flat[order]
    rank = torch.arange(flat.numel(), device=ids.device) - starts[expert]
    out[(ends - padded)[expert] + rank] = order.int()
    blocks = torch.arange(total // block, device=ids.device) * block
    experts_of = torch.searchsorted(ends, blocks, right=True).int()
    return out, experts_of, torch.tensor([total, 0], dtype=torch.int32, device=ids.device)


def graph_us(calls: list[Any], replays: int = 5) -> tuple[float, Any]:
    """Median device microseconds per call of a graph of `calls`, and the graph for more replays."""
    for call in calls[:1]:
        call()
    graph = DEV.capture(lambda: [call() for call in calls], warmups=0)
    return replay_us(graph, len(calls), replays), graph


def replay_us(graph: Any, calls: int, replays: int) -> float:
    graph.replay()
    times = []
    for _ in range(replays):
        a, b = DEV.event(), DEV.event()
        a.record()
        graph.replay()
        b.record()
        times.append(a.elapsed_ms(b) * 1e3 / calls)
    return statistics.median(times)


def our_call(p: Problem, i: int, data: Any, al: Any, cfg: dict[str, Any], part: str, down_cfg: Any = None) -> Any:
    x, weights, ids = data
    e = p.sets[i % len(p.sets)][1]
    alignment = Alignment(*al, cfg["BLOCK_SIZE_M"])
    if part == "up":
        return lambda: ours.up_projection(x, e, weights, alignment, cfg)
    if part == "down":
        rows = ours.Rows(torch.randn(al[0].numel(), p.N, device=x.device, dtype=x.dtype))
        return lambda: ours.down_projection(rows, e, weights, alignment, cfg, x.dtype)
    call = ours.Call(x, e, weights, ids, cfg, down_cfg or cfg, False, None)
    return lambda: ours.run_aligned(call, alignment)


def their_call(k: Any, p: Problem, i: int, data: Any, al: Any, cfg: dict[str, Any], part: str, down: Any = None) -> Any:
    x, weights, ids = data
    a = anchor.Anchor(k, p.sets[i % len(p.sets)][0], p.topk, p.mode == "fp8")
    if part == "up":
        return lambda: a.up(x, weights, ids, al, cfg)
    if part == "down":
        act = torch.randn(ids.numel(), p.N, device=x.device, dtype=x.dtype)
        return lambda: a.down(act, weights, ids, al, cfg)
    return lambda: a.chain(x, weights, ids, al, cfg, down or cfg)


def variants(cfg: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """A candidate as our rules run it and, with --explore, with the rules' choices turned round."""
    if not EXPLORE:
        inline = mode == "fp8" and cfg["BLOCK_SIZE_M"] <= 32
        return [dict(cfg), {**cfg, "INLINE": False}] if inline else [dict(cfg)]
    if not cfg["USE_TMA"]:
        return []
    out = [dict(cfg)]
    if cfg["BLOCK_SIZE_M"] <= 32 and cfg["BLOCK_SIZE_N"] >= 64:
        out.append({**cfg, "SWAP_AB": True})
    if mode == "fp8":
        out = [{**o, "INLINE": flag} for o in out for flag in ((False, True) if o["BLOCK_SIZE_M"] <= 32 else (False,))]
    size, rows = (1 if mode == "fp8" else 2), cfg["BLOCK_SIZE_M"] + cfg["BLOCK_SIZE_N"]
    shared = cfg["num_stages"] * rows * cfg["BLOCK_SIZE_K"] * size + cfg["BLOCK_SIZE_M"] * cfg["BLOCK_SIZE_N"]
    fit = max(1, min(8, 233472 // (shared + 1024)))
    return [{**o, "PROGRAMS": n} for o in out for n in (0, fit)]


EXPLORE = False


def compile_worker(job: tuple[str, str, list[int], int, int, bool]) -> int:
    """Compile a share of the candidates by running them on a tiny problem."""
    global EXPLORE
    shape, mode, tokens, share, shares, EXPLORE = job
    k = anchor.load(lambda x, g: per_token_group_quant_fp8(x, g))
    p = Problem(shape, mode, copies=1, experts=2)
    done = 0
    seen = {json.dumps(c): c for m in tokens for c in configs(mode, m)}
    for n, cfg in enumerate(seen.values()):
        if n % shares != share:
            continue
        for m in (1, 16):
            data = p.inputs(m, 0)
            al = align(data[2], cfg["BLOCK_SIZE_M"], p.E)
            for part in ("up", "down"):
                calls = [] if EXPLORE else [their_call(k, p, 0, data, al, cfg, part)]
                if m == 1:
                    calls += [our_call(p, 0, data, al, v, part) for v in variants(cfg, mode)]
                for call in calls:
                    done += guarded(call) is not None
    return done


def guarded(call: Any) -> Any:
    """The call's result; None where the config does not compile or does not fit."""
    try:
        call()
        DEV.synchronize()
    except triton.runtime.errors.OutOfResources:
        return None
    except (triton.compiler.CompilationError, RuntimeError) as error:
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise
        log(f"FAILED {str(error)[:200]}")
        return None
    return True


def best_of(p: Problem, k: Any, m: int, datas: Any, als: Any, kernel: str) -> dict[str, Any]:
    """Best up and down config of one kernel at one batch size: shared BLOCK_SIZE_M, smallest sum."""
    times: dict[str, dict[int, tuple[float, Any]]] = {"up": {}, "down": {}}
    for cfg in configs(p.mode, m):
        for v in variants(cfg, p.mode) if kernel == "ours" else [cfg]:
            bm = v["BLOCK_SIZE_M"]
            for part in ("up", "down"):
                args = [(i, datas[i], als[bm][i], v, part) for i in range(INNER)]
                calls = [our_call(p, *a) if kernel == "ours" else their_call(k, p, *a) for a in args]
                if guarded(calls[0]) is None:
                    continue
                us, _ = graph_us(calls)
                log(f"{p.mode} m={m} {kernel} {part} {list(v.values())} {us:.2f}")
                if us < times[part].get(bm, (math.inf, None))[0]:
                    times[part][bm] = (us, v)
    bm = min(set(times["up"]) & set(times["down"]), key=lambda b: times["up"][b][0] + times["down"][b][0])
    return {"up_us": times["up"][bm][0], "up": times["up"][bm][1], "down_us": times["down"][bm][0],
            "down": times["down"][bm][1], "up_best_us": min(t[0] for t in times["up"].values())}  # fmt: skip


LOG: list[str] = []


def log(line: str) -> None:
    LOG.append(line)


def measure(p: Problem, k: Any, m: int, rounds: int = 4) -> dict[str, Any]:
    """Both kernels at one batch size: best configs, then chains in turns."""
    datas = [p.inputs(m, s) for s in range(INNER)]
    blocks = {c["BLOCK_SIZE_M"] for c in configs(p.mode, m)}
    als = {b: [align(d[2], b, p.E) for d in datas] for b in blocks}
    k.is_arch_support_pdl = lambda: False
    mine = best_of(p, k, m, datas, als, "ours")
    floor = {part: p.floor_us(m, part) for part in ("up", "down")}
    row: dict[str, Any] = {"m": m, "ours": mine, "floor_us": floor}
    graphs: dict[str, Any] = {}

    def ours_chain(up: Any, down: Any) -> tuple[float, Any]:
        al = als[up["BLOCK_SIZE_M"]]
        return graph_us([our_call(p, i, datas[i], al[i], up, "chain", down) for i in range(INNER)])

    _, graphs["ours"] = ours_chain(mine["up"], mine["down"])
    if not EXPLORE:
        theirs = row["sglang"] = best_of(p, k, m, datas, als, "sglang")
        tm = theirs["up"]["BLOCK_SIZE_M"]
        for name, pdl in (("sglang", False), ("sglang_pdl", True)):
            k.is_arch_support_pdl = lambda pdl=pdl: pdl
            _, graphs[name] = graph_us([
                their_call(k, p, i, datas[i], als[tm][i], theirs["up"], "chain", theirs["down"]) for i in range(INNER)
            ])  # fmt: skip
    times: dict[str, list[float]] = {n: [] for n in graphs}
    for r in range(rounds):
        for name in list(graphs) if r % 2 == 0 else list(graphs)[::-1]:
            times[name].append(replay_us(graphs[name], INNER, 5))
    chain = row["chain_us"] = {n: statistics.median(v) for n, v in times.items()}
    row["ratio"] = min(v for n, v in chain.items() if EXPLORE or n != "ours") / chain["ours"]
    return row


def check(p: Problem, k: Any) -> dict[str, float]:
    """Relative errors of both chains against the float32 twin, over odd batch sizes and both tile paths."""
    out = {}
    for m in (1, 17, 130):
        x, weights, ids = p.inputs(m, 7)
        ref = fused_experts_reference(x.float(), p.sets[0][1], weights, ids)
        for cfg in configs(p.mode, m):
            al = align(ids, cfg["BLOCK_SIZE_M"], p.E)
            calls = {"sglang": their_call(k, p, 0, (x, weights, ids), al, cfg, "chain")} if m == 1 else {}
            for n, v in enumerate(variants(cfg, p.mode)):
                calls[f"ours{n}"] = our_call(p, 0, (x, weights, ids), al, v, "chain")
            for name, call in calls.items():
                try:
                    err = float((call().float() - ref).norm() / ref.norm())
                except triton.runtime.errors.OutOfResources:
                    continue
                out[name] = max(out.get(name, 0.0), err if err == err else math.inf)
                if not err < 0.03:
                    print("WRONG", m, name, cfg, err, flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--explore", action="store_true", help="only our kernel, with its rules turned round")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--deadline", type=float, default=270.0, help="seconds after which no new batch size starts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    global EXPLORE
    EXPLORE = args.explore
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        jobs = [
            (s, args.mode, args.tokens, i, args.workers, args.explore) for s in args.shapes for i in range(args.workers)
        ]
        counts = pool.map(compile_worker, jobs, chunksize=1)
    print(f"compiled and ran {sum(counts)} in {time.monotonic() - begin:.0f} s", flush=True)
    k = anchor.load(lambda x, g: per_token_group_quant_fp8(x, g))
    result: dict[str, Any] = {
        "device": DEV.identity().name, "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv), "mode": args.mode, "shapes": {},
    }  # fmt: skip
    for shape in args.shapes:
        p = Problem(shape, args.mode)
        entry: dict[str, Any] = {"dims": SHAPES[shape], "errors": check(p, k), "rows": []}
        print(
            shape, {n: f"{v:.1e}" for n, v in entry["errors"].items()}, f"{time.monotonic() - begin:.0f}s", flush=True
        )
        result["shapes"][shape] = entry
        for m in args.tokens:
            if time.monotonic() - begin > args.deadline:
                break
            row = measure(p, k, m)
            entry["rows"].append(row)
            print(describe(shape, row), flush=True)
        del p
        DEV.empty_cache()
        args.out.write_text(json.dumps(result, indent=1))
    ratios = [r["ratio"] for s in result["shapes"].values() for r in s["rows"]]
    result["geomean"] = math.exp(statistics.mean(map(math.log, ratios))) if ratios else None
    args.out.write_text(json.dumps(result, indent=1))
    args.out.with_suffix(".log").write_text("\n".join(LOG))
    print(f"geomean {result['geomean']}, worst {min(ratios, default=None)}, {time.monotonic() - begin:.0f} s")
    return 0


def describe(shape: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    f, mine = row["floor_us"], row["ours"]
    text = f"{shape} M={row['m']:5d} ratio {row['ratio']:.3f} " + " ".join(
        f"{n} {v:.1f}" for n, v in row["chain_us"].items()
    )
    text += f" | up {mine['up_us']:.1f} ({f['up'] / mine['up_best_us']:.2f}) down {mine['down_us']:.1f} "
    text += f"({f['down'] / mine['down_us']:.2f}) {short(mine['up'])} / {short(mine['down'])}"
    if "sglang" in row:
        t = row["sglang"]
        text += f" | up {t['up_us']:.1f} down {t['down_us']:.1f} {short(t['up'])} / {short(t['down'])}"
    return text


def short(cfg: dict[str, Any]) -> str:
    """A config in one word."""
    flags = [n[0] for n in ("USE_TMA", "SWAP_AB", "INLINE") if cfg.get(n)]
    flags += [f"P{cfg['PROGRAMS']}"] if cfg.get("PROGRAMS") else []
    return "-".join(str(cfg[n]) for n in anchor._FIELDS) + "".join("+" + f for f in flags)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    raise SystemExit(main())
