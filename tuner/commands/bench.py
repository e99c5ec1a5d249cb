"""`tuner bench`: one launch of one process, timing the op with whatever configs the look-up gives."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moegate import kernels
from moegate.dispatch import Capabilities, Selection, select
from moegate.dispatch import Problem as Question
from moegate.errors import InfraError, UsageError
from moegate.exits import Exit
from moegate.records import ConfigUse, DeviceIdentity, Launch, Measurement, Proof, Samples, to_json
from tuner.child.worker import classify
from tuner.commands import FEW_SIZES
from tuner.commands.common import INTERPRETED, parse_sizes, publish
from tuner.engines import ensure_engine
from tuner.lookup import Lookup, lookup
from tuner.model import problem_of
from tuner.pipeline import device_name_of
from tuner.problem import Problem
from tuner.routing.source import source_of
from tuner.runtime import ensure_runnable, environment_words

__all__ = ["run"]

_ROUTES = {"cpu": 1}
_REPS = {"triton": 3, "torch": 20, "reference": 5}
_GPU_REPS = 20
_METRIC = "kernel_time"
_CONFIGURED = "triton"  # the one backend that reads configs
# Ops whose plain backends look at ids or indices on the host.
_READS_HOST = {(op, backend) for op in ("fused_experts", "store_kv_cache") for backend in ("torch", "reference")}


@dataclass(frozen=True)
class _Bench:
    """What is timed, where, and how it was chosen. `adapter` and `device` are of modules that need torch."""

    problem: Problem
    engine: str
    selection: Selection
    lookup: Lookup
    adapter: Any
    device: Any
    identity: DeviceIdentity
    versions: dict[str, str]
    interpreted: bool
    graphs: bool
    reps: int

    @property
    def timed_interpreter(self) -> bool:
        """Whether the times are those of Triton's interpreter."""
        return self.interpreted and self.selection.resolved == _CONFIGURED


@dataclass(frozen=True)
class _Timed:
    """The samples (the primary one last), the configs used, and the number of calls."""

    samples: tuple[Samples, ...]
    uses: tuple[ConfigUse, ...]
    calls: int


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
    ensure_engine(engine)
    problem = problem_of(model, shape, op, dtype, engine=engine, tp=tp, ep=ep)
    sizes, source = parse_sizes(batch_sizes, FEW_SIZES), source_of(routing)
    ensure_runnable()
    bench = _prepare(problem, engine, backend, None if configs == "none" else Path(configs), graph == "full", reps)
    with _fitting(problem):
        routes, copies = _cold(bench, seed)
        timed = _time(bench, sizes, routes, seed, source)
    launch = Launch(
        bench.identity, started, round(time.monotonic() - began, 3), timed.samples, _proof(bench, timed, backend),
        bench.device.peak_memory(),
        detail={"problem": problem.as_dict(), "graph": graph, "routing": routing, "seed": seed, "copies": copies},
    )  # fmt: skip
    measurement = Measurement(
        "kernel-bench", "ok", bench.identity, bench.versions, {"launches": 1, "batch_sizes": len(sizes)}, (launch,),
        interpreter=bench.timed_interpreter,
    )  # fmt: skip
    publish(measurement, out, as_json)
    if not as_json:
        _print(bench, timed)
    return Exit.OK


def _prepare(problem: Problem, engine: str, backend: str, configs: Path | None, graphs: bool, reps: int) -> _Bench:
    """Choose the backend and find its configs; nothing is on the device yet."""
    from tuner.engines import load_adapter
    from xkernels.device import is_interpreted, live
    from xkernels.probes import asking

    device, versions = live(), environment_words()
    identity = device.identity()
    caps = Capabilities(
        device.platform(), versions.get("torch"), versions.get("triton"), is_interpreted(), ask=asking(device)
    )
    selection = _select(problem, caps, backend)
    adapter = load_adapter(engine, problem)
    name = device_name_of({"device": {"kind": device.kind, "name": identity.name}})
    found = lookup(problem, configs, name, versions.get("triton", "0.0.0"), adapter.default)
    chosen = reps or (_GPU_REPS if device.kind != "cpu" else _REPS.get(selection.resolved, 3))
    graphs = graphs and device.kind != "cpu"
    if graphs:
        _ensure_capturable(problem.op, selection.resolved)
    return _Bench(
        problem, engine, selection, found, adapter, device, identity, versions, is_interpreted(), graphs, chosen
    )


@contextlib.contextmanager
def _fitting(problem: Problem) -> Iterator[None]:
    """Say of what the memory here does not hold that it does not."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if classify(error)[0] != "out-of-memory":
            raise
        raise InfraError(f"{problem.op} does not fit into the memory here: {str(error).splitlines()[0]:.200}") from None


def _ensure_capturable(op: str, resolved: str) -> None:
    """Refuse a device graph of what reads its indices back to the host."""
    if (op, resolved) in _READS_HOST:
        raise UsageError(f"{resolved} reads back to the host: no graph can hold it", field="--graph", fix="eager")


def _cold(bench: _Bench, seed: int) -> tuple[int, int]:
    """Make the weights, in so many copies that no call finds its own in the cache; returns routings and copies."""
    from tuner.child.timing import cold_copies

    device = bench.device
    device.reset_peak_memory()
    size = bench.adapter.setup(device.torch_device(), seed, 1)
    routes = _ROUTES.get(device.kind, 10)
    copies = min(routes, cold_copies(size, device.limits().l2_bytes)) if device.kind != "cpu" else 1
    if copies > 1:
        bench.adapter.setup(device.torch_device(), seed, copies)
    return routes, copies


def _time(bench: _Bench, sizes: Sequence[int], routes: int, seed: int, routing: str) -> _Timed:
    """Time every batch size."""
    import torch

    from tuner.child.timing import Timer
    from tuner.routing.load import routes_for

    samples: list[Samples] = []
    uses: list[ConfigUse] = []
    calls = 0
    timer, where = Timer(bench.device, bench.graphs), bench.device.torch_device()
    with torch.inference_mode():
        for size in sizes:
            drawn = routes_for(bench.problem, size, routes, device=where, seed=seed, source=routing)
            call, used = _call(bench, bench.adapter.batch(size, drawn), size)
            counted = _counting(call)
            counted(0)
            values = timer.sample(f"{size}", counted, routes, bench.reps, None)
            timer.forget()
            samples.append(Samples(f"{_METRIC}_m{size}", "us", "lower", tuple(round(v, 3) for v in values)))
            calls += counted.calls
            uses += [replace(use, calls=counted.calls) for use in used]
    primary = math.exp(statistics.fmean(math.log(max(statistics.median(s.values), 1e-9)) for s in samples))
    samples.append(Samples(f"{_METRIC}_geomean", "us", "lower", (round(primary, 3),), primary=True))
    return _Timed(tuple(samples), tuple(uses), calls)


def _proof(bench: _Bench, timed: _Timed, requested: str) -> Proof:
    """What was asked for, what ran, and with which code."""
    root, own = bench.lookup.root, bench.adapter.kernel_hash()
    return Proof(
        bench.engine, requested, bench.selection.resolved, tuple(to_json(step) for step in bench.selection.chain),
        None if root is None else str(root.resolve()), bench.lookup.digest, timed.uses,
        {bench.selection.resolved: timed.calls},
        (kernels.code_hash() or "") if bench.engine == "moegate" else own, kernels={bench.problem.op: own},
    )  # fmt: skip


class _counting:
    """A call that counts itself. A replayed graph counts once, when it is captured."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._call, self.calls = call, 0

    def __call__(self, route: int) -> Any:
        self.calls += 1
        return self._call(route)


def _select(problem: Problem, caps: Capabilities, backend: str) -> Selection:
    question = Question(
        dtype=problem.activation_dtype, quant="fp8_w8a8" if problem.dtype.startswith("fp8") else None,
        block_shape=problem.block_shape, experts=problem.E, topk=problem.topk, hidden=problem.H,
    )  # fmt: skip
    return select(problem.op, question, caps, backend)


def _call(bench: _Bench, batch: Any, size: int) -> tuple[Callable[[int], Any], tuple[ConfigUse, ...]]:
    """The call to time, and which config each projection runs with (none where the backend reads none)."""
    resolved = bench.selection.resolved
    if resolved != _CONFIGURED:
        return lambda route: batch.whole_by(resolved, route), ()
    found = bench.lookup.at(size)
    return lambda route: batch.whole(found.configs, route), found.uses


def _print(bench: _Bench, timed: _Timed) -> None:
    print(f"{bench.problem.op} {bench.problem.dtype} with {bench.selection.resolved}")
    if bench.timed_interpreter:
        print(INTERPRETED)
    reasons = {use.batch_size: use.reason for use in timed.uses if use.projection != "down"}
    for row in timed.samples:
        size = row.metric.removeprefix(f"{_METRIC}_m")
        why = reasons.get(int(size), "no config read") if size.isdigit() else ""
        print(f"  {row.metric}: {statistics.median(row.values):.1f} {row.unit} {why}".rstrip())
