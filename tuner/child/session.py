"""What a child can do: say who it is, measure, compare candidates, verify, and compile without a device."""

from __future__ import annotations

import functools
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from moegate.records import to_json
from tuner.child.facts import compile_facts, settle_keys, stop_above, stub_driver
from tuner.child.timing import Timer, cold_copies, poisoned
from tuner.compile.facts import captured
from tuner.engines import load_adapter
from tuner.engines.base import Adapter, Batch, Routes
from tuner.playoff import play
from tuner.problem import Problem, Projection
from tuner.routing.load import routes_for
from xkernels.device import Device, is_interpreted, live

__all__ = ["Session"]

_COMPILE_ROUTES = 1


class Session:
    """State of one child: a device, one problem's weights, and the inputs of one batch size."""

    def __init__(self) -> None:
        self.adapter: Adapter | None = None
        self.batches: OrderedDict[int, Batch] = OrderedDict()
        self.options: dict[str, Any] = {}
        self.timer: Timer | None = None
        self._compile_batches: dict[str, Batch] = {}
        self._checked: set[str] = set()
        self._warm: set[Projection] = set()
        self._compiles = _CompileCounter()

    def do_hello(self, engine: str | None = None, problem: dict[str, Any] | None = None,
                 sizes: Sequence[int] = ()) -> dict[str, Any]:  # fmt: skip
        """Identity of the device and versions of what runs; what is known of an engine's kernel without its weights."""
        device = live()
        limits = device.limits()
        kernel: dict[str, Any] = {}
        if engine is not None and problem is not None:
            adapter = _load(engine, problem)
            kernel = {
                "kernel_hash": adapter.kernel_hash(),
                "kernel_files": dict(adapter.kernel_files()),
                "descriptors_first": bool(adapter.descriptors & device.features()),
                "defaults": {str(size): adapter.default(size) for size in sizes},
            }
        return {
            "kernel": kernel,
            "device": to_json(device.identity()),
            "platform": device.platform(),
            "interpreter": is_interpreted(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": _python()},
            "limits": {"shared": limits.shared_bytes, "l2": limits.l2_bytes},
            "target": _target(device),
            "pid": os.getpid(),
        }

    def do_warm(self, engine: str, problem: dict[str, Any]) -> dict[str, Any]:
        """Pay for the imports, and touch no device."""
        _load(engine, problem)
        return {"pid": os.getpid()}

    def do_setup(self, engine: str, problem: dict[str, Any], seed: int, routes: int, routing: str = "uniform",
                 graphs: bool = True) -> dict[str, Any]:  # fmt: skip
        """Make the adapter and its weights on this child's device."""
        device = live()
        self.options = {"seed": seed, "routes": routes, "routing": routing}
        self.adapter = _load(engine, problem)
        size = self.adapter.setup(device.torch_device(), seed, 1)
        copies = cold_copies(size, device.limits().l2_bytes) if device.kind != "cpu" else 1
        self.options["routes"] = max(routes, copies)  # one replay goes through all copies
        if copies > 1:
            self.adapter.setup(device.torch_device(), seed, copies)
        self.timer = Timer(device, graphs and device.kind != "cpu")
        return {"kernel_hash": self.adapter.kernel_hash(), "weight_bytes": size, "copies": copies}

    def do_measure(self, size: int, projection: Projection, config: dict[str, Any], reps: int,
                   abort_us: float | None = None) -> dict[str, Any]:  # fmt: skip
        """Check one config once, then time it. The answer holds `samples_us`, or `error` and `reason`."""
        timer = self._timer()
        with timer.spending("inputs"):
            batch = self._at(size)
        name = f"{size} {projection} {sorted(config.items())}"
        samples: list[float] = []
        if name not in self._checked:
            begin = time.perf_counter()
            with timer.spending("launch"), poisoned():
                out = batch.launch(projection, config, 0)
                live().synchronize()
            first_us = (time.perf_counter() - begin) * 1e6
            with timer.spending("check"):
                verdict = batch.check(projection, config, out)
            if not verdict.ok:
                return {"error": "wrong-result", "reason": verdict.reason}
            self._checked.add(name)
            if not timer.graphs and projection in self._warm:
                samples = [first_us]  # one interpreted call takes long enough for its overhead not to matter
            self._warm.add(projection)
        if len(samples) < reps and not (abort_us is not None and samples and samples[0] > abort_us):
            samples += timer.sample(
                name, lambda route: batch.launch(projection, config, route), batch.routes, reps - len(samples), abort_us
            )
        return {"samples_us": samples, **self._vitals()}

    def do_finals(self, size: int, candidates: list[dict[Projection, dict[str, Any]]], rounds: int,
                  whole: bool = False) -> dict[str, Any]:  # fmt: skip
        """Time whole-op candidates against each other, interleaved; `samples_us[i]` belongs to `candidates[i]`.

        whole: nobody drops out, all play `rounds` rounds.
        """
        batch, timer = self._at(size), self._timer()
        calls = {f"{size} {place}": functools.partial(batch.whole, configs) for place, configs in enumerate(candidates)}
        with timer.spending("finals"):
            once = timer.rounds(calls, batch.routes)
            samples = play(once, len(candidates), rounds, drop=not whole)
        timer.forget()
        return {"samples_us": samples, **self._vitals()}

    def do_verify(self, size: int, configs: dict[Projection, dict[str, Any]]) -> dict[str, Any]:
        """The whole op, twice, into NaN-filled memory, at `size` and at an odd size next to it."""
        worst = {"max_rel": 0.0, "rms": 0.0}
        for tokens in (size, size + 1 if size % 2 == 0 else size + 2):
            batch = self._at(tokens)
            with self._timer().spending("verify"), poisoned():
                first, second = batch.whole(configs, 0), batch.whole(configs, 0)
                live().synchronize()
            verdict = batch.check_whole(first)
            if not verdict.ok:
                return {"error": "wrong-result", "reason": f"at {tokens} tokens: {verdict.reason}"}
            if not torch.equal(first, second):
                return {"error": "nondeterministic", "reason": f"two runs over {tokens} tokens differ"}
            worst = {"max_rel": max(worst["max_rel"], verdict.max_rel), "rms": max(worst["rms"], verdict.rms)}
        return {**worst, **self._vitals()}

    def do_compile(self, engine: str, problem: dict[str, Any], target: Mapping[str, Any], size: int,
                   projection: Projection, config: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
        """Compile one config for a target without touching a device; fills the cache that the measuring child reads."""
        adapter = self._simulated(engine, problem, target)
        batch = self._compile_batch(size)
        launch = functools.partial(batch.launch, projection, config, 0)
        return {"facts": compile_facts(adapter.kernels_of(projection), launch)}

    def do_helpers(self, engine: str, problem: dict[str, Any], target: Mapping[str, Any], block: int) -> dict[str, Any]:
        """Compile what runs around the tuned kernels at one BLOCK_SIZE_M (0: whatever needs none)."""
        adapter = self._simulated(engine, problem, target)
        with captured() as compiled:
            for call in adapter.helpers(block):
                call()
        return {"compiled": [name for name, _ in compiled]}

    def _simulated(self, engine: str, problem: dict[str, Any], target: Mapping[str, Any]) -> Adapter:
        if self.adapter is None:
            stub_driver(str(target["backend"]), str(target["arch"]), int(target["warp"]))
            stop_above(str(target["backend"]), int(target["limits"][0]))
            adapter = _load(engine, problem)
            adapter.simulate(target)
            adapter.setup(torch.device("meta"), 0, 1)
            self.adapter = adapter
        return self.adapter

    def _compile_batch(self, size: int) -> Batch:
        name = str(size)
        if name not in self._compile_batches:
            assert self.adapter is not None
            p = self.adapter.problem
            meta: Routes = [
                (
                    torch.empty(size, p.topk, dtype=torch.float32, device="meta"),
                    torch.empty(size, p.topk, dtype=torch.int32, device="meta"),
                )
            ] * _COMPILE_ROUTES
            self._compile_batches[name] = self.adapter.batch(size, meta)
        return self._compile_batches[name]

    def _at(self, size: int) -> Batch:
        """The inputs of a batch size; those of others stay as long as most of the device's memory is free."""
        if self.adapter is None:
            raise RuntimeError("setup comes first")
        if size not in self.batches:
            device = live()
            free, total = device.memory_info()
            if self.batches and (device.kind == "cpu" or free < total // 2):
                self._timer().forget()
                self._checked.clear()
                self.batches.clear()
                device.empty_cache()
            routes = routes_for(
                self.adapter.problem, size, int(self.options["routes"]), device=device.torch_device(),
                seed=int(self.options["seed"]), source=str(self.options["routing"]),
            )  # fmt: skip
            self.batches[size] = self.adapter.batch(size, routes)
        return self.batches[size]

    def _timer(self) -> Timer:
        if self.timer is None:
            raise RuntimeError("setup comes first")
        return self.timer

    def _vitals(self) -> dict[str, Any]:
        spent = {name: round(seconds, 3) for name, seconds in self._timer().spent.items()}
        return {
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "compiled": self._compiles.names,
            "spent": spent,
        }


def _load(engine: str, problem: dict[str, Any]) -> Adapter:
    adapter = load_adapter(engine, Problem.from_dict(problem))
    settle_keys()
    return adapter


class _CompileCounter:
    """Which kernels this process compiled itself instead of finding them in the cache."""

    def __init__(self) -> None:
        self.names: list[str] = []
        knobs = getattr(triton, "knobs", None)
        if knobs is not None and not is_interpreted():
            knobs.compilation.listener = self._heard

    def _heard(self, **event: Any) -> None:
        if not event.get("cache_hit", False):
            self.names.append(str(getattr(event.get("metadata"), "name", None) or _named(event)))


def _named(event: dict[str, Any]) -> str:
    metadata = event.get("metadata")
    return str(metadata["name"]) if isinstance(metadata, dict) and "name" in metadata else "?"


def _python() -> str:
    import platform

    return platform.python_version()


def _target(device: Device) -> dict[str, Any] | None:
    """Triton's target of the live device, for the compile pool; None where nothing is compiled."""
    if device.kind == "cpu":
        return None
    from triton.runtime import driver

    target = driver.active.get_current_target()
    limits = device.limits()
    return {
        "backend": target.backend,
        "arch": str(target.arch),
        "warp": int(target.warp_size),
        "features": sorted(device.features()),
        "limits": [limits.shared_bytes, limits.l2_bytes, limits.units, limits.resident_blocks],
    }
