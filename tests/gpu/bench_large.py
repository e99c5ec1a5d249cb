"""Variants of the expert GEMMs for many rows, each in a process with a deadline: errors first, then times in turns.

    PYTHONPATH=.:kernels python tests/gpu/bench_large.py --out large.json

A variant that hangs or is wrong costs its own process only. What is compared: the pair of configs that docs/results
names for this kernel and for SGLang's at a batch size, and the variant. All calls run in device graphs as in bench_moe.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LARGE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 16, "num_warps": 8,
         "num_stages": 4, "USE_TMA": True, "LARGE": True}  # fmt: skip
_F8 = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_warps": 4,
       "num_stages": 4, "USE_TMA": True}  # fmt: skip
_L8 = {**LARGE, "BLOCK_SIZE_K": 128}
# variant -> mode, up config, down config; the first ones matter most
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "large": ("bf16", LARGE, LARGE),
    "large8": ("fp8", _L8, _L8),
    "wide 2": ("fp8", {**_F8, "num_stages": 2, "WIDE": True}, _F8),
    "exact": ("bf16", {"EXACT": True}, {}),  # the present kernel with the sigmoid of before: added to its own configs
    "large lead": ("bf16", *[{**LARGE, "LEAD": 1, "PDL": True}] * 2),
    "large8 lead": ("fp8", *[{**_L8, "LEAD": 2, "PDL": True}] * 2),
    "large nofence": ("bf16", *[{**LARGE, "FENCE": False}] * 2),
    "large8 nofence": ("fp8", *[{**_L8, "FENCE": False}] * 2),
    "large static": ("bf16", *[{**LARGE, "DYNAMIC": False}] * 2),
    "large8 static": ("fp8", *[{**_L8, "DYNAMIC": False}] * 2),
    "wide 128": ("fp8", *[{**_F8, "BLOCK_SIZE_M": 128, "num_warps": 8, "WIDE": True}] * 2),
    "large g8": ("bf16", *[{**LARGE, "GROUP_SIZE_M": 8}] * 2),
    "large8 g8": ("fp8", *[{**_L8, "GROUP_SIZE_M": 8}] * 2),
    "exact8": ("fp8", {"EXACT": True}, {}),
}
TOKENS = (4096, 1024, 512)
ROUNDS = 3


def recorded(mode: str, shape: str, m: int, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pair of configs in docs/results of a kernel at a batch size."""
    rows = json.loads((ROOT / f"docs/results/h200_moe_{mode}.json").read_text())["shapes"][shape]["rows"]
    row = next(r for r in rows if r["m"] == m)[kernel]
    return row["up"], row["down"]


def own(variant: str, shape: str, m: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A variant's pair of configs."""
    mode, up, down = VARIANTS[variant]
    base = recorded(mode, shape, m, "ours") if "BLOCK_SIZE_M" not in up else ({}, {})
    return {**base[0], **up}, {**base[1], **down}


def pairs(mode: str, shape: str, m: int, variant: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What is timed beside each other at one batch size."""
    found = {"present": recorded(mode, shape, m, "ours"), "sglang": recorded(mode, shape, m, "sglang")}
    return {**found, variant: own(variant, shape, m)}


def compile_share(job: tuple[int, int]) -> int:
    """Compile a share of everything the run launches, launching only what is known to run; how many compiled."""
    import bench_moe as b
    from moe_problem import SHAPES, Problem, align
    from triton.runtime.jit import JITFunction

    share, shares = job
    work: list[Any] = []
    for variant, (mode, *_) in VARIANTS.items():
        for shape in SHAPES:
            for m in TOKENS:
                for name, (up, down) in pairs(mode, shape, m, variant).items():
                    few = 16 if m <= 512 or name != "sglang" else 1024
                    work.append((name == "sglang", mode, shape, few, up, down))
    for shape in SHAPES:
        for m in (1, 16):
            up, down = recorded("fp8", shape, m, "ours")
            work += [(False, "fp8", shape, 16, {**up, "LINES": n}, down) for n in (0, 1, 2, 4)]
    unique = list({json.dumps(w, sort_keys=True): w for w in work}.values())
    kernels, problems, done = b.their_kernels(), {}, 0
    launch = JITFunction.run
    for theirs, mode, shape, m, up, down in unique[share::shares]:
        p = problems.get((mode, shape)) or problems.setdefault((mode, shape), Problem(shape, mode, 1, 2))
        data = p.inputs(m, 0)
        al = align(data[2], up["BLOCK_SIZE_M"], p.E)
        if not theirs:
            JITFunction.run = lambda self, *a, **k: launch(self, *a, **{**k, "warmup": True})
        try:
            call = b.their_call(kernels, p, 0, data, al, up, "chain", down) if theirs else (
                b.our_call(p, 0, data, al, up, "chain", down))  # fmt: skip
            call()
            done += 1
        except Exception as error:
            print("does not compile:", mode, up, repr(error)[:300], flush=True)
        finally:
            JITFunction.run = launch
    return done


def errors(p: Any, shape: str, variant: str) -> dict[str, float]:
    """Relative errors of the chain against the float32 twin at odd batch sizes and routings."""
    import bench_moe as b
    import torch
    from moe_problem import DEV, align

    from xkernels.ops.fused_experts import fused_experts_reference

    up, down = own(variant, shape, TOKENS[0])
    out = {}
    for m, kind in ((1, ""), (17, ""), (130, ""), (777, ""), (300, "one"), (300, "few")):
        x, weights, ids = p.inputs(m, 7)
        if kind == "one":
            ids = torch.arange(p.topk, device=ids.device, dtype=torch.int32).expand_as(ids).contiguous()
        elif kind == "few":
            ids = (ids % (p.topk + 3)).int()
        data = (x, weights, ids)
        ref = fused_experts_reference(x.float(), p.sets[0][1], weights, ids)
        al = align(ids, up["BLOCK_SIZE_M"], p.E)
        for _ in range(2):
            got = b.our_call(p, 0, data, al, up, "chain", down)().float()
            DEV.synchronize()
            error = float((got - ref).norm() / ref.norm())
            out[f"{m}{kind}"] = max(out.get(f"{m}{kind}", 0.0), error if error == error else 9.0)
    return out


def times(p: Any, shape: str, m: int, variant: str) -> dict[str, Any]:
    """Microseconds of up, down and chain of the three, in turns."""
    import bench_moe as b
    from moe_problem import INNER, align

    datas = [p.inputs(m, s) for s in range(INNER)]
    kernels = b.their_kernels()
    graphs: dict[tuple[str, str], Any] = {}
    for name, (up, down) in pairs(p.mode, shape, m, variant).items():
        als = [align(d[2], up["BLOCK_SIZE_M"], p.E) for d in datas]
        for part in ("up", "down", "chain"):

            def call(i: int, part: str = part, up: Any = up, down: Any = down, name: str = name, als: Any = als
                     ) -> Callable[[], Any]:  # fmt: skip
                if name == "sglang":
                    return b.their_call(kernels, p, i, datas[i], als[i], up, part, down)
                return b.our_call(p, i, datas[i], als[i], up, part, down)

            graphs[name, part] = b.captured([call(i) for i in range(INNER)])
    found: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    for r in range(ROUNDS):
        for key in list(graphs)[:: 1 if r % 2 == 0 else -1]:
            found[key].append(b.replay_us(graphs[key], INNER, 4))
    row: dict[str, Any] = {"m": m, "floor": {part: p.floor_us(m, part) for part in ("up", "down")}}
    for (name, part), values in found.items():
        row.setdefault(name, {})[part] = statistics.median(values)
    row["tflops_up"] = {n: 4e-6 * m * p.topk * p.N * p.H / row[n]["up"] for n in ("present", "sglang", variant)}
    return row


def child(variant: str) -> None:
    """Everything of one variant; a JSON line after each step."""
    from moe_problem import DEV, SHAPES, Problem

    def say(**words: Any) -> None:
        print("@" + json.dumps({"variant": variant, **words}), flush=True)

    mode = VARIANTS[variant][0]
    for shape in SHAPES:
        p = Problem(shape, mode, 2)
        found = errors(p, shape, variant)
        say(shape=shape, errors=found)
        if max(found.values()) > 0.03:
            continue
        for m in TOKENS:
            say(shape=shape, row=times(p, shape, m, variant))
        del p
        DEV.empty_cache()


def lines(tokens: tuple[int, ...] = (1, 2, 4, 16)) -> None:
    """LINES of the FP8 up projection for few tokens: chains with 0 to 4 of them, in turns."""
    import bench_moe as b
    from moe_problem import INNER, SHAPES, Problem, align

    for shape in SHAPES:
        p = Problem(shape, "fp8", 2)
        for m in tokens:
            up, down = recorded("fp8", shape, min(m, 1) if m < 16 else 16, "ours")
            datas = [p.inputs(m, s) for s in range(INNER)]
            als = [align(d[2], up["BLOCK_SIZE_M"], p.E) for d in datas]
            graphs = {
                n: b.captured(
                    [b.our_call(p, i, datas[i], als[i], {**up, "LINES": n}, "chain", down) for i in range(INNER)]
                )
                for n in (0, 1, 2, 4)
            }
            found: dict[int, list[float]] = {n: [] for n in graphs}
            for r in range(6):
                for n in list(graphs)[:: 1 if r % 2 == 0 else -1]:
                    found[n].append(b.replay_us(graphs[n], INNER, 8))
            us = {n: round(statistics.median(v), 2) for n, v in found.items()}
            print("@" + json.dumps({"variant": "lines", "shape": shape, "m": m, "us": us}), flush=True)


def show(line: dict[str, Any]) -> str:
    """One line of the table."""
    head = f"{line['variant']:14s} {line.get('shape', ''):5s}"
    if "errors" in line:
        return head + " errors " + " ".join(f"{m}:{e:.1e}" for m, e in line["errors"].items())
    if "row" not in line:
        return head + " " + str(line)
    row, name = line["row"], line["variant"]
    text = head + f" M={row['m']:5d} chain x{row['sglang']['chain'] / row[name]['chain']:.3f}"
    for part in ("up", "down"):
        text += f" | {part} " + " ".join(f"{n[:7]} {row[n][part]:.1f}" for n in ("sglang", "present", name))
        text += f" floor {row['floor'][part] / row[name][part]:.2f}"
    return text + f" | chain {row['present']['chain']:.1f} -> {row[name]['chain']:.1f}"


def run_child(variant: str, limit: float, keep: list[dict[str, Any]], out: Path) -> None:
    """A variant in a process of its own, killed at its deadline; its lines are kept as they come."""
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, "--child", variant], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    timer = threading.Timer(limit, process.kill)
    timer.start()
    tail: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            keep.append(json.loads(line[1:]))
            print(show(keep[-1]), flush=True)
            out.write_text(json.dumps(keep, indent=1))
        else:
            tail = [*tail[-14:], line.rstrip()]
    code = process.wait()
    timer.cancel()
    if code:
        keep.append({"variant": variant, "failed": code, "tail": tail})
        print(f"{variant}: exit {code} after {time.monotonic() - begin:.0f} s", *tail[-6:], sep="\n   ", flush=True)
        out.write_text(json.dumps(keep, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=[*VARIANTS, "lines"])
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=390.0, help="when no new variant starts")
    parser.add_argument("--limit", type=float, default=60.0, help="a variant's deadline")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        lines() if args.child == "lines" else child(args.child)
        return 0
    begin = time.monotonic()
    keep: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        job = pool.map_async(compile_share, [(i, args.workers) for i in range(args.workers)], chunksize=1)
        try:
            counts = job.get(150)
        except multiprocessing.TimeoutError:
            counts = []
            print("compiling took too long; going on", flush=True)
    print(f"compiled {sum(counts)} in {time.monotonic() - begin:.0f} s", flush=True)
    hung = False
    for variant in (*list(VARIANTS)[:6], "lines", *list(VARIANTS)[6:]):
        left = args.seconds - (time.monotonic() - begin)
        if left < 20:
            print("no time for", variant, flush=True)
            continue
        limit = 25.0 if hung and variant.startswith("large") else args.limit
        run_child(variant, min(limit, left), keep, args.out)
        hung = hung or keep[-1:] == [] or keep[-1].get("failed") == -9
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    raise SystemExit(main())
