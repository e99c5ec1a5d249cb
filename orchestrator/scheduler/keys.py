"""The key of an attempt: a hash over everything that could change its result. While it holds, a result is kept."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.paths import config_root
from moegate.records import ModelSpec, Plan, PlannedCell

__all__ = ["CODEGEN", "Key", "codegen_variables", "host_fingerprint", "key", "source_revision", "words"]

# Variables that change what compilers generate, by vendor. Set ones belong into keys and provenance.
CODEGEN: Mapping[str, tuple[str, ...]] = {
    "triton": ("TRITON_",),
    "nvidia": ("CUDA_", "NVCC_", "PTXAS_"),
    "amd": ("HSA_", "HIP_", "AMDGCN_", "SGLANG_USE_AITER", "AITER_"),
    "intel": ("IGC_", "SYCL_", "NEO", "ZE_", "UR_", "ONEAPI_"),
}
CLOCKS = "MOEGATE_CLOCKS_RECORD"
"""Environment variable: where the clock policy of the cards is recorded."""

_PACKAGES = ("moegate", "tuner", "serving", "xkernels")

# What a key is made of, in a person's words.
_WORDS: Mapping[str, str] = {
    "kind": "kind",
    "axes": "parameters",
    "arms": "arms (variables, commit or config content)",
    "model": "model",
    "device": "device of the pool",
    "policy": "numbers of pairs, margin or metric",
    "seed": "seed",
    "image": "image",
    "host": "host (kernel, driver, processor or clocks)",
    "codegen": "code-generation variables",
    "source": f"sources ({', '.join(_PACKAGES)})",
    "checked": "rules of check or shipped configs",
}
_SHORT = 12


@dataclass(frozen=True)
class Key:
    """A key, and a short hash of each part of it: where two keys differ, these say in what."""

    value: str
    parts: Mapping[str, str] = field(default_factory=dict, compare=False)


def words(parts: Iterable[str]) -> list[str]:
    """Parts of a key as a person calls them, in the order of the table."""
    wanted = set(parts)
    return [word for name, word in _WORDS.items() if name in wanted]


def codegen_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The code-generation variables among `env`."""
    prefixes = tuple(prefix for group in CODEGEN.values() for prefix in group)
    return {name: value for name, value in sorted(env.items()) if name.startswith(prefixes)}


@cache
def host_fingerprint() -> dict[str, str]:
    """What the host is: kernel, processor, clock policy and driver versions, as far as they can be read."""
    facts = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": str(os.cpu_count()),
    }
    readings = {
        "governor": Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "nvidia": Path("/proc/driver/nvidia/version"),
        "amdgpu": Path("/sys/module/amdgpu/version"),
        "xe": Path("/sys/module/xe/version"),
    }
    for name, path in readings.items():
        try:
            facts[name] = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[0]
        except (OSError, IndexError):
            continue
    clocks = _gpu_clocks(Path(os.environ.get(CLOCKS, "/run/moegate-clocks")))
    return {**facts, "clocks": clocks} if clocks else facts


def _gpu_clocks(record: Path) -> str:
    """The clock limits that hold on this host's cards, as `infra/host/clocks.sh` recorded them; empty without one."""
    try:
        text = record.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return ", ".join(sorted(set(re.findall(r"has (\S+ MHz)", text))))


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")


@cache
def source_revision(packages: tuple[str, ...] = _PACKAGES) -> str:
    """A hash over the Python files of the packages that children run, found without importing them."""
    rows: list[tuple[str, str]] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            root = Path(folder)
            rows += [(f"{name}/{path.relative_to(root)}", canonical.file_digest(path)) for path in root.rglob("*.py")]
    return canonical.digest(sorted(rows))


def key(
    plan: Plan, cell: PlannedCell, *, env: Mapping[str, str], image: Mapping[str, str], trees: Mapping[str, str]
) -> Key:
    """The content hash of one attempt.

    env: what the children are given. image: what the isolation says of itself (image digest, daemon). trees: digest of
    the config tree per arm.
    """
    arms: list[dict[str, Any]] = []
    for arm in plan.arms:
        if arm.name in cell.arms:
            arms.append({"name": arm.name, "env": arm.env, "source": arm.source, "configs": trees.get(arm.name, "")})
    model = next((model for model in plan.models if model.name == cell.model), None)
    pool = next((pool for pool in plan.pools if pool.name == cell.pool), None)
    parts = {
        "kind": cell.kind,
        "axes": cell.axes,
        "arms": arms,
        "model": _model(model),
        "device": None if pool is None else [pool.device, pool.device_name],
        "policy": _policy(plan, cell),
        "seed": plan.seed,
        "image": dict(image),
        "host": host_fingerprint(),
        "codegen": codegen_variables(env),
        "source": source_revision(),
        "checked": _checked() if cell.kind == "check" else None,
    }
    return Key(canonical.digest(parts), {name: canonical.digest(part)[:_SHORT] for name, part in parts.items()})


@cache
def _checked() -> list[str]:
    """What a check cell looks at: our rules, and the shipped configs."""
    return [source_revision(("moegate", "orchestrator")), canonical.tree_digest(config_root())]


def _model(model: ModelSpec | None) -> list[Any] | None:
    """What of a model counts; not where its config lies, so that a run can move with its repository."""
    if model is None:
        return None
    return [model.digest, model.weights, model.revision, model.tp, model.ep, model.dtype, model.quantization]


def _policy(plan: Plan, cell: PlannedCell) -> list[Any] | None:
    """The numbers that decided how many pairs were measured."""
    if plan.compare is None or not cell.arms:
        return None
    compare, gate = plan.compare, plan.gate
    return [compare.screen, compare.confirm, compare.futility, gate.margin, gate.metric.get(cell.kind)]
