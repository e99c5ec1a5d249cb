"""The compiling process: one target each, since Triton keeps what it compiled for the target it first saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tuner.compile.facts import captured, facts_of, has_block_loads
from tuner.compile.targets import SimulatedDevice, Target, activate, find
from tuner.kernel_names import EXPERTS, GEMMS, LINEAR, SHARED

__all__ = ["compile_config", "compile_variant", "start"]

_STATE: dict[str, Target] = {}


def start(name: str) -> None:
    """Prepare this process for one target."""
    target = find(name)
    activate(target)
    _STATE["target"] = target


def compile_variant(name: str) -> list[dict[str, Any]]:
    """Facts of each kernel that the variant called `name` launches."""
    from tuner.compile.variants import VARIANTS

    variant = next(v for v in VARIANTS if v.name == name)
    return _rows({"variant": name}, lambda target: variant.call(target), asked=variant.descriptors)


def compile_config(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts of one kernel under one config of a file; `job` is made by `configs.jobs_of`."""
    config = {"num_warps": 4, "num_stages": 3, **job["config"]}
    call, wanted, names = _OPS[job["op"]](job, config)
    rows = _rows({}, call, only=wanted, asked=bool(config.get("USE_TMA", False)))
    mine = [row for row in rows if row["kernel"] in names]
    # Some kernels serve both projections; the up projection's launch comes first.
    return [{**row, "key": job["key"]} for row in (mine[-1:] if job.get("projection") == "down" else mine[:1])]


_Made = tuple[Callable[[Target], Any], str, tuple[str, ...]]


def _experts(job: dict[str, Any], config: dict[str, Any]) -> _Made:
    """The call of a job of routed experts, its kernel where nothing is compiled, and all that it may be."""
    import torch

    from tuner.compile.variants import experts_call

    tile = (int(config["BLOCK_SIZE_M"]), int(config["BLOCK_SIZE_N"]), int(config["BLOCK_SIZE_K"]))
    extra = {n: v for n, v in config.items() if n not in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")}
    sizes, dtype = (2, int(job["hidden"]), int(job["N"])), getattr(torch, job["dtype"])
    call = partial(experts_call, kind=job["kind"], tile=tile, dtype=dtype, extra=extra, sizes=sizes, topk_=2)
    return call, GEMMS[job["projection"]], EXPERTS


def _linear(job: dict[str, Any], config: dict[str, Any]) -> _Made:
    """The same for a job of a block-FP8 linear layer."""
    from tuner.compile.variants import linear_call

    block = (int(job["block"][0]), int(job["block"][1]))
    return partial(linear_call, shape=(int(job["N"]), int(job["K"])), block=block, config=config), LINEAR, (LINEAR,)


_OPS: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], _Made]] = {
    "fused_experts": _experts,
    "block_fp8_linear": _linear,
}


def _rows(words: dict[str, Any], call: Any, only: str | None = None, asked: bool = False) -> list[dict[str, Any]]:
    from xkernels.device import simulated

    target = _STATE["target"]
    begin = time.perf_counter()
    words = {**words, "target": target.name}
    try:
        with captured() as built, simulated(SimulatedDevice(target)):  # type: ignore[arg-type]
            call(target)
    except Exception as error:  # whatever a compiler or a launcher says is this config's result
        while error.__cause__ is not None:  # a kernel's error is wrapped once per function that called it
            error = error.__cause__  # type: ignore[assignment]
        reason = f"{type(error).__name__}: {_gist(str(error))}"
        return [{**words, "kernel": only, "status": "failed", "error": reason, "seconds": _since(begin)}]
    done = {**words, "status": "ok", "error": None, "seconds": _since(begin)}
    return [{**done, "kernel": name, **_facts(name, kernel, target, asked)} for name, kernel in built]


# Kernels that load weights through descriptors where their config asks for it.
_DESCRIBED = (*GEMMS.values(), *SHARED, LINEAR)


def _facts(name: str, kernel: Any, target: Target, asked: bool) -> dict[str, Any]:
    """Facts of one kernel; descriptor loads that were asked for and are not even in its source did not get through."""
    facts = facts_of(kernel, target)
    lost = asked and facts["block_loads"] is None and has_block_loads(target) and name in _DESCRIBED
    return {**facts, "block_loads": False} if lost else facts


def _gist(text: str) -> str:
    """The line of a compiler's message that says what is wrong: not the caret under the source, which comes last."""
    lines = [line.strip() for line in text.splitlines() if line.strip().strip("^~ ")]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or [""])[-1][:300]


def _since(begin: float) -> float:
    return round(time.perf_counter() - begin, 3)
