"""Compile without launching, and what the compiled kernel says about itself."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import triton

from tuner.compile.facts import captured
from tuner.compile.targets import activate_target

__all__ = ["OverShared", "compile_facts", "settle_keys", "stop_above", "stub_driver"]

# Where Triton goes on after a kernel's shared memory is known: what follows is half of the work.
_LAST_STAGES = {
    "cuda": ("triton.backends.nvidia.compiler", "CUDABackend", "make_ptx"),
    "hip": ("triton.backends.amd.compiler", "HIPBackend", "make_amdgcn"),
}


def stub_driver(backend: str, arch: str, warp: int) -> None:
    """Make Triton compile for (backend, arch, warp size), such as ("cuda", "90", 32), whatever this machine has."""
    activate_target(backend, int(arch) if arch.isdigit() else arch, warp)


class OverShared(Exception):
    """A kernel needs more shared memory than its target has."""


def stop_above(backend: str, shared: int) -> None:
    """In a compile-only child: give a compile up as soon as it is known not to fit. Nothing where Triton differs."""
    place = _LAST_STAGES.get(backend)
    owner = getattr(importlib.import_module(place[0]), place[1], None) if place is not None else None
    if place is None or owner is None or not hasattr(owner, place[2]) or not shared:
        return
    make = getattr(owner, place[2])
    bound = not isinstance(inspect.getattr_static(owner, place[2]), staticmethod)

    def stop(self: Any, source: Any, metadata: dict[str, Any], *more: Any) -> Any:
        needed = int(metadata.get("shared") or 0)
        if needed > shared:
            raise OverShared(f"{needed} bytes of shared memory, the device has {shared}")
        return make(self, source, metadata, *more) if bound else make(source, metadata, *more)

    setattr(owner, place[2], stop)


def settle_keys() -> int:
    """Let every kernel that this process has loaded compute its cache key, in one order; returns how many there are.

    With Triton 3.6 a kernel's key depends on which kernels that share its helpers were compiled before it. Each child
    compiles in an order of its own, so that one would not find what another one left in the cache.
    """
    found: dict[tuple[str, str], Any] = {}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if issubclass(type(value), triton.runtime.JITFunction) and value.__module__ == module.__name__:
                found[value.__module__, name] = value
    for key in sorted(found):
        _ = found[key].cache_key
    return len(found)


def compile_facts(kernels: Collection[str], launch: Callable[[], Any]) -> dict[str, Any]:
    """Run `launch()` with launches replaced by compiles; returns what the compiler says of the one of `kernels` in it.

    Whatever else the launch needs is compiled too. `hash` identifies the binary, `shared`
    is bytes of shared memory, `tmem` columns of tensor memory, `threads` of one block, `spill_bytes` per thread (None
    where the compiler does not say).
    """
    begin = time.perf_counter()
    with captured() as compiled:
        launch()
    mine = [built for name, built in compiled if name in kernels]
    if len(mine) != 1:
        raise RuntimeError(f"one launch must compile {' or '.join(kernels)} once, not {len(mine)} times")
    built = mine[0]
    meta = built.metadata
    return {
        "seconds": round(time.perf_counter() - begin, 3),
        "hash": str(getattr(built, "hash", "") or getattr(meta, "hash", "")),
        "shared": int(getattr(meta, "shared", 0) or 0),
        "tmem": int(getattr(meta, "tmem_size", 0) or 0),
        "threads": int(getattr(meta, "num_warps", 1)) * int(getattr(meta, "warp_size", 32) or 32),
        "spill_bytes": _spills(built),
    }


def _spills(built: Any) -> int | None:
    """Bytes of scratch memory per thread: from AMD's assembly, or from the stack frame that NVIDIA's tool reports."""
    text = built.asm.get("amdgcn")
    if isinstance(text, str):
        found = re.search(r"ScratchSize:\s*(\d+)", text)
        return int(found[1]) if found else None
    cubin = built.asm.get("cubin")
    tool = _cuobjdump()
    if not isinstance(cubin, bytes) or tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=30)
    found = re.search(r"STACK:(\d+)", done.stdout)
    return int(found[1]) if found else None


@functools.cache
def _cuobjdump() -> str | None:
    """The tool that Triton's package carries."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(tool) if tool.is_file() else None
