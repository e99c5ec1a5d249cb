"""The measuring children of `bench_large`: `python large_child.py STAGE ARGUMENTS-AS-JSON`, a JSON line a step.

Lines begin with `@`; `{"begin": NAME}` says what comes next, so that the parent knows at what a child died.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bench_moe as b
import large_variants as v
import torch
from moe_problem import DEV, INNER, SHAPES, Problem, align

from xkernels.ops import fused_experts as fused
from xkernels.ops._details import experts as ours
from xkernels.ops.align import moe_align_block_size
from xkernels.ops.quant import per_token_group_quant_fp8

ROUNDS, REPLAYS = 3, 4


def say(**words: Any) -> None:
    """A line for the parent."""
    print("@" + json.dumps(words), flush=True)


def lasting(error: Exception) -> None:
    """Raise what a process does not recover from: after a fault on the device everything fails."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error):
        raise error


def poison() -> None:
    """Fill what the allocator gives out next with NaN."""
    kept = [torch.full((n,), float("nan"), device=DEV.torch_device()) for n in (1 << 26, 1 << 22, 1 << 18, 1 << 14)]
    DEV.synchronize()
    del kept


def layer(p: Problem, data: Any, up: Any, down: Any, which: int = 0) -> torch.Tensor:
    """The whole operator, alignment included."""
    x, weights, ids = data
    return fused.fused_experts(x, p.sets[which][1], weights, ids, backend="triton", up=up, down=down)


def routings(p: Problem, m: int, kind: str) -> Any:
    """Inputs with a routing that is odd on purpose."""
    x, weights, ids = p.inputs(m, 7)
    if kind == "one":
        ids = torch.arange(p.topk, device=ids.device, dtype=torch.int32).expand_as(ids).contiguous()
    elif kind == "few":
        ids = (ids % (p.topk + 3)).int()
    elif kind == "none":
        ids = torch.full_like(ids, -1)
    elif kind == "filtered":
        ids = torch.where(ids % 3 == 0, -1, ids).int()
    return x, weights, ids


CASES = (
    (1, ""),
    (17, ""),
    (64, "one"),
    (65, "one"),
    (130, ""),
    (777, ""),
    (300, "few"),
    (300, "filtered"),
    (20, "none"),
)


def twins(p: Problem) -> list[tuple[str, Any, torch.Tensor]]:
    """Name, inputs and the float32 twin's answer of each case."""
    found = []
    for m, kind in CASES:
        data = routings(p, m, kind)
        found.append((f"{m}{kind}", data, fused.fused_experts_reference(data[0].float(), p.sets[0][1], *data[1:])))
        DEV.synchronize()
        say(begin="twins")
    return found


def errors(p: Problem, cases: list[tuple[str, Any, torch.Tensor]], up: Any, down: Any) -> dict[str, float]:
    """Relative errors against the float32 twin, each case twice; 9 is NaN."""
    out: dict[str, float] = {}
    for name, data, ref in cases:
        for _ in range(2):
            poison()
            got = layer(p, data, up, down).float()
            DEV.synchronize()
            scale = float(ref.norm()) or 1.0  # tokens of no expert at all give zeros
            error = float((got - ref).norm()) / scale
            out[name] = max(out.get(name, 0.0), error if error == error else 9.0)
        say(alive=name)
    return out


def bits(p: Problem, up: Any, down: Any) -> dict[str, float]:
    """Whether bits stay the same (0) again, from a graph, from two graphs at once and from two streams at once."""
    one, two = p.inputs(515, 3), p.inputs(1030, 4)
    want = [layer(p, d, up, down).clone() for d in (one, two)]
    out = dict.fromkeys(("again", "graph", "streams", "graphs"), 0.0)

    def differs(name: str, got: Any, ref: torch.Tensor) -> None:
        DEV.synchronize()
        out[name] = max(out[name], 0.0 if torch.equal(got, ref) else 1.0)

    held: list[Any] = [None, None]

    def keep(i: int, data: Any) -> None:
        held[i] = layer(p, data, up, down)

    for _ in range(8):
        differs("again", layer(p, one, up, down), want[0])
        got = DEV.beside(lambda: layer(p, one, up, down), lambda: layer(p, two, up, down))
        differs("streams", got[0], want[0])
        differs("streams", got[1], want[1])
        say(alive="bits")
    graphs = [DEV.capture(lambda i=i, d=d: keep(i, d), warmups=1) for i, d in enumerate((one, two))]
    for _ in range(4):
        for i, graph in enumerate(graphs):
            held[i].zero_()
            graph.replay()
            differs("graph", held[i], want[i])
        _ = [h.zero_() for h in held]
        DEV.synchronize()
        DEV.beside(graphs[0].replay, graphs[1].replay)
        differs("graphs", held[0], want[0])
        differs("graphs", held[1], want[1])
    return out


def check(mode: str, names: list[str]) -> None:
    """Errors and bits of variants, one after the other; on the small shape. `present` is there for comparison."""
    p = Problem("E64", mode, 1)
    cases = twins(p)
    for name in names:
        say(begin=name)
        try:
            pair = v.recorded(mode, "E64", 1024, "ours") if name == "present" else v.variants(mode)[name]
            found = errors(p, cases, *pair)
            right = max(found.values()) < v.LIMIT[mode]
            same = bits(p, *pair) if right else {}
            say(stage="check", mode=mode, name=name, errors=found, bits=same, right=right)
        except Exception as error:
            lasting(error)
            say(stage="check", mode=mode, name=name, right=False, why=repr(error)[-300:])


def best_of_theirs(p: Problem, kernels: Any, m: int, datas: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """SGLang's up and down configs from the candidates at one batch size: each the fastest with its block of rows."""
    found: dict[int, dict[str, tuple[float, Any]]] = {}
    for config in b.configs(p.mode, min(m, 4096)):
        als = [align(d[2], config["BLOCK_SIZE_M"], p.E) for d in datas]
        say(alive="sglang")
        for part in ("up", "down"):
            calls = [b.their_call(kernels, p, i, datas[i], als[i], config, part, config) for i in range(INNER)]
            if b.guarded(calls[0]):
                us = b.replay_us(b.captured(calls), INNER, 3)
                best = found.setdefault(config["BLOCK_SIZE_M"], {})
                best[part] = min(best.get(part, (us, config)), (us, config), key=lambda pair: pair[0])
    whole = [parts for parts in found.values() if len(parts) == 2]
    if not whole:
        return v.recorded(p.mode, "E64", m, "sglang")
    best = min(whole, key=lambda parts: parts["up"][0] + parts["down"][0])
    return best["up"][1], best["down"][1]


def calls_of(
    p: Problem, kernels: Any, name: str, part: str, pair: Any, datas: Any, als: Any
) -> list[Callable[[], Any]]:
    """A graph's calls of one kernel and part."""
    up, down = pair
    if name == "sglang":
        one = b.their_call

        def whole(i: int) -> Any:
            a = moe_align_block_size(datas[i][2], up["BLOCK_SIZE_M"], p.E)
            al = (a.sorted_ids, a.expert_ids, a.num_post_padded)
            return one(kernels, p, i, datas[i], al, up, "chain", down)()

        if part == "layer":
            return [lambda i=i: whole(i) for i in range(INNER)]
        return [one(kernels, p, i, datas[i], als[i], up, part, down) for i in range(INNER)]
    if part == "layer":
        return [lambda i=i: layer(p, datas[i], up, down, i % len(p.sets)) for i in range(INNER)]
    return [b.our_call(p, i, datas[i], als[i], up, part, down) for i in range(INNER)]


def in_turns(graphs: dict[Any, Any], rounds: int = ROUNDS) -> dict[Any, float]:
    """Median microseconds a call of graphs that are replayed in turns."""
    found: dict[Any, list[float]] = {key: [] for key in graphs}
    for r in range(rounds):
        for key in list(graphs)[:: 1 if r % 2 == 0 else -1]:
            found[key].append(b.replay_us(graphs[key], INNER, REPLAYS))
    return {key: statistics.median(values) for key, values in found.items()}


def times(mode: str, shape: str, names: list[str], tokens: list[int]) -> None:
    """Every part of the present kernel, SGLang's and the variants, in turns; a line per batch size."""
    p, kernels = Problem(shape, mode, 2), b.their_kernels()
    say(begin="inputs")
    for m in tokens:
        datas = [p.inputs(m, s) for s in range(INNER)]
        say(begin="sglang")
        pairs = {"sglang": best_of_theirs(p, kernels, m, datas), "present": v.recorded(mode, shape, m, "ours")}
        pairs |= {name: v.variants(mode)[name] for name in names}
        graphs: dict[tuple[str, str], Any] = {}
        outs: dict[str, torch.Tensor] = {}
        held = []  # a graph knows addresses only: what its calls read must outlive its last replay
        for name, pair in pairs.items():
            say(begin=name)
            als = [align(d[2], pair[0]["BLOCK_SIZE_M"], p.E) for d in datas]
            for part in v.PARTS:
                try:
                    calls = calls_of(p, kernels, name, part, pair, datas, als)
                    if part == "chain":
                        outs[name] = calls[0]().float()
                    graph = b.captured(calls)
                    graph.replay()
                    DEV.synchronize()  # a fault costs the variant that it belongs to
                    held.append((calls, als))
                    graphs[name, part] = graph
                except Exception as error:
                    lasting(error)
                    say(stage="note", text=f"{mode} {shape} M={m} {name} {part}: {error!r}"[:300])
        say(begin="turns")
        row: dict[str, Any] = {"floor": {part: p.floor_us(m, part) for part in ("up", "down")}, "us": {}}
        if "present" in outs:  # one call's result beside the present kernel's
            whole = outs["present"]
            row["off"] = {name: float((out - whole).norm() / whole.norm()) for name, out in outs.items()}
        for (name, part), us in in_turns(graphs).items():
            row["us"].setdefault(name, {})[part] = us
        say(stage="times", mode=mode, shape=shape, m=m, configs={n: list(c) for n, c in pairs.items()}, **row)
        del graphs, held, outs


def few(names: list[str]) -> None:
    """Experiments on the FP8 up projection of a few rows."""
    p = Problem("E64", "fp8", 4)
    for m in v.FEW_TOKENS:
        up, down = v.recorded("fp8", "E64", m, "ours")
        datas = [p.inputs(m, s) for s in range(INNER)]
        ref = fused.fused_experts_reference(datas[0][0].float(), p.sets[0][1], *datas[0][1:])
        graphs: dict[tuple[str, str], Any] = {}
        held = []
        for name in names:
            say(begin=name)
            mine = {**up, **v.FEW[name]}
            als = [align(d[2], mine["BLOCK_SIZE_M"], p.E) for d in datas]
            try:
                got = b.our_call(p, 0, datas[0], als[0], mine, "chain", down)().float()
                off = float((got - ref).norm() / ref.norm())
                if not off < v.LIMIT["fp8"]:
                    raise ValueError(f"wrong: {off}")
                both = {}
                for part in ("up", "chain"):
                    calls = [b.our_call(p, i, datas[i], als[i], mine, part, down) for i in range(INNER)]
                    both[name, part] = b.captured(calls)
                    both[name, part].replay()
                    DEV.synchronize()
                    held.append((calls, als))
            except Exception as error:
                lasting(error)
                say(stage="note", text=f"few {name} M={m}: {error!r}"[:300])
                continue
            graphs |= both
        say(begin="turns")
        graphs["quantising", "up"] = b.captured(
            [lambda d=d: per_token_group_quant_fp8(d[0], 128, overlap=True) for d in datas]
        )
        row: dict[str, dict[str, float]] = {}
        for (name, part), us in in_turns(graphs, 5).items():
            row.setdefault(name, {})[part] = us
        alone = row.pop("quantising")["up"]
        say(stage="few", m=m, floor=p.floor_us(m, "up"), quantising=alone, us=row)


def probe(part: str, hidden: int, extra: dict[str, Any]) -> None:
    """The smallest bf16 launches of the kernel for many rows: hidden / 64 k-steps, one block of columns.

    part: `up` alone, or `chain` with its error against the float32 twin.
    """
    SHAPES["probe"] = (4, 2, hidden, 128)
    p = Problem("probe", "bf16", 1)
    config = {**v.variants("bf16")["ws"][0], **extra}
    data = p.inputs(17, 1)
    al = align(data[2], config["BLOCK_SIZE_M"], p.E)
    ref = fused.fused_experts_reference(data[0].float(), p.sets[0][1], *data[1:])
    DEV.synchronize()
    say(begin=f"{part} {hidden} {extra}")
    got = b.our_call(p, 0, data, al, config, part, config)()
    DEV.synchronize()
    error = float((got.float() - ref).norm() / ref.norm()) if part == "chain" else -1.0
    say(stage="probe", part=part, hidden=hidden, extra=extra, error=error)


def exact() -> None:
    """What the sigmoid's fast forms are worth: the present kernel with them and with the exact ones, in turns."""
    folder = Path(ours.__file__).parent
    text = (folder / "activation.py").read_text()
    line = next(t for t in text.splitlines() if "CUDA: tl.constexpr =" in t)
    names = {"activation": text.replace(line, "    CUDA: tl.constexpr = False")}
    for module in ("wide_gemm", "moe_gemm"):
        names[module] = (folder / f"{module}.py").read_text()
    with tempfile.TemporaryDirectory() as home:
        for name, body in names.items():
            for other in names:
                body = body.replace(f"from xkernels.ops._details.{other} import", f"from exact_{other} import")
            Path(home, f"exact_{name}.py").write_text(body)
        sys.path.insert(0, home)
        kinds = {"fast": ours._k, "exact": importlib.import_module("exact_moe_gemm")}
        for mode in ("bf16", "fp8"):
            p = Problem("E64", mode, 2)
            for m in (4096, 1024, 1):
                up, down = v.recorded(mode, "E64", m, "ours")
                datas = [p.inputs(m, s) for s in range(INNER)]
                als = [align(d[2], up["BLOCK_SIZE_M"], p.E) for d in datas]
                graphs = {}
                for kind, module in kinds.items():
                    ours._k = module
                    calls = [b.our_call(p, i, datas[i], als[i], up, "up", down) for i in range(INNER)]
                    graphs[kind] = b.captured(calls)
                say(stage="exact", mode=mode, m=m, us=in_turns(graphs, 5))


STAGES: dict[str, Callable[..., None]] = {"check": check, "times": times, "few": few, "exact": exact, "probe": probe}

if __name__ == "__main__":
    say(begin="start")
    STAGES[sys.argv[1]](**json.loads(sys.argv[2]))
