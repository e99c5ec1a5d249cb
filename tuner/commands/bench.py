"""`tuner bench`: one launch of one process, timing the op with whatever configs the look-up gives."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import ConfigTree, Pair
from moegate.dispatch import Capabilities, Selection, select
from moegate.dispatch import Problem as Question
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import ConfigUse, Launch, Measurement, Proof, Samples, to_json
from tuner.commands.common import parse_sizes, publish
from tuner.model import problem_of
from tuner.pipeline import device_name_of
from tuner.problem import Problem
from tuner.runtime import ensure_runnable, environment_words

__all__ = ["run"]

_DEFAULT_SIZES = (1, 2, 4, 8)
_ROUTES = {"cpu": 1}
_REPS = {"triton": 3, "torch": 20, "reference": 5}
_GPU_REPS = 20
_METRIC = "kernel_time"


@dataclass(frozen=True)
class _Bench:
    """What is timed, and how it was chosen."""

    problem: Problem
    selection: Selection
    pair: Pair
    triton: str
    topk: int
    graphs: bool
    reps: int


def run(
    *,
    model: Path | None,
    shape: str | None,
    op: str,
    dtype: str,
    batch_sizes: str,
    configs: str,
    backend: str,
    graph: str,
    seed: int,
    engine: str,
    tp: int,
    ep: int,
    routing: str,
    reps: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Time and write the record; the process exit code."""
    began, started = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    if graph not in ("eager", "full"):
        raise UsageError(f"unknown graph mode {graph!r}", field="--graph", fix="eager or full")
    problem = problem_of(model, shape, op, dtype, engine=engine, tp=tp, ep=ep)
    if problem.op != "fused_experts":
        raise UsageError(f"{problem.op} is not benched with config files", field="--op", fix="fused_experts")
    sizes = parse_sizes(batch_sizes, _DEFAULT_SIZES)
    ensure_runnable()
    import torch

    from tuner.child.timing import Timer, cold_copies
    from tuner.engines import load_adapter
    from xkernels.device import is_interpreted, live

    device, versions = live(), environment_words()
    selection = _select(problem, device.platform(), versions, is_interpreted(), backend)
    tree = ConfigTree(None if configs == "none" else Path(configs))
    identity = device.identity()
    triton = versions.get("triton", "0.0.0")
    pair = tree.resolve_pair(
        problem.key(device_name_of({"device": {"kind": device.kind, "name": identity.name}})), triton=triton
    )
    chosen = reps or (_GPU_REPS if device.kind != "cpu" else _REPS.get(selection.resolved, 3))
    plan = _Bench(problem, selection, pair, triton, problem.topk, graph == "full" and device.kind != "cpu", chosen)
    adapter = load_adapter(engine, problem)
    device.reset_peak_memory()
    weight_bytes = adapter.setup(device.torch_device(), seed, 1)
    routes = _ROUTES.get(device.kind, 10)
    copies = min(routes, cold_copies(weight_bytes, device.limits().l2_bytes)) if device.kind != "cpu" else 1
    if copies > 1:
        adapter.setup(device.torch_device(), seed, copies)
    timer = Timer(device, plan.graphs)
    with torch.inference_mode():
        samples, uses, calls = _time(plan, adapter, timer, sizes, routes, seed, routing)
    proof = Proof(
        engine, backend, selection.resolved, tuple(to_json(step) for step in selection.chain),
        None if tree.root is None else str(tree.root.resolve()), canonical.tree_digest(tree.root) if tree.root else "",
        tuple(uses), {selection.resolved: calls}, adapter.kernel_hash(),
    )  # fmt: skip
    launch = Launch(
        identity, started, round(time.monotonic() - began, 3), tuple(samples), proof, device.peak_memory(),
        detail={"problem": problem.as_dict(), "graph": graph, "routing": routing, "seed": seed, "copies": copies},
    )  # fmt: skip
    measurement = Measurement(
        "kernel-bench", "ok", identity, versions, {"launches": 1, "batch_sizes": len(sizes)}, (launch,),
        interpreter=is_interpreted() and selection.resolved == "triton",
    )  # fmt: skip
    publish(measurement, out, as_json)
    if not as_json:
        _print(plan, samples, uses)
    return Exit.OK


def _time(
    plan: _Bench, adapter: Any, timer: Any, sizes: Sequence[int], routes: int, seed: int, routing: str
) -> tuple[list[Samples], list[ConfigUse], int]:
    """Time every batch size: the samples (the primary one last), the configs used, and the number of calls."""
    from tuner.routing.load import routes_for

    samples: list[Samples] = []
    uses: list[ConfigUse] = []
    calls = 0
    where = timer.device.torch_device()
    for size in sizes:
        batch = adapter.batch(size, routes_for(plan.problem, size, routes, device=where, seed=seed, source=routing))
        call, used = _call(plan, batch, size)
        counted = _counting(call)
        counted(0)
        values = timer.sample(f"{size}", counted, routes, plan.reps, None)
        timer.forget()
        samples.append(Samples(f"{_METRIC}_m{size}", "us", "lower", tuple(round(v, 3) for v in values)))
        calls += counted.calls
        uses += [_with_calls(use, counted.calls) for use in used]
    primary = math.exp(statistics.fmean(math.log(max(statistics.median(s.values), 1e-9)) for s in samples))
    samples.append(Samples(f"{_METRIC}_geomean", "us", "lower", (round(primary, 3),), primary=True))
    return samples, uses, calls


class _counting:
    """A call that counts itself. A replayed graph counts once, when it is captured."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._call, self.calls = call, 0

    def __call__(self, route: int) -> Any:
        self.calls += 1
        return self._call(route)


def _select(problem: Problem, platform: str, versions: dict[str, str], interpreted: bool, backend: str) -> Selection:
    caps = Capabilities(platform, versions.get("torch"), versions.get("triton"), interpreted)
    question = Question(
        dtype=problem.activation_dtype, quant="fp8_w8a8" if problem.dtype.startswith("fp8") else None,
        block_shape=problem.block_shape, experts=problem.E, topk=problem.topk, hidden=problem.H,
    )  # fmt: skip
    return select(problem.op, question, caps, backend)


def _call(plan: _Bench, batch: Any, size: int) -> tuple[Callable[[int], Any], list[ConfigUse]]:
    """The call to time, and which config each projection runs with (none where the backend reads none)."""
    if plan.selection.resolved != "triton":
        return lambda route: batch.whole_by(plan.selection.resolved, route), []
    up, down = plan.pair.for_batch(size, plan.topk)
    op, pair = plan.problem.op, plan.pair
    uses = [
        ConfigUse(op, "up", size, pair.up.file, pair.up.reason, up, pair.up.alias),
        ConfigUse(op, "down", size, pair.down.file, pair.down.reason, down, pair.down.alias),
    ]
    return lambda route: batch.whole({"up": up, "down": down}, route), uses


def _with_calls(use: ConfigUse, calls: int) -> ConfigUse:
    return ConfigUse(use.op, use.projection, use.batch_size, use.file, use.reason, use.config, use.alias, calls)


def _print(plan: _Bench, samples: list[Samples], uses: list[ConfigUse]) -> None:
    print(f"{plan.problem.op} {plan.problem.dtype} with {plan.selection.resolved}", file=sys.stderr)
    reasons = {use.batch_size: use.reason for use in uses if use.projection == "up"}
    for row in samples:
        size = row.metric.removeprefix(f"{_METRIC}_m")
        why = reasons.get(int(size), "no config read") if size.isdigit() else ""
        print(f"  {row.metric}: {statistics.median(row.values):.1f} {row.unit} {why}", file=sys.stderr)
