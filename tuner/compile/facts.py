"""Reading a compiled kernel: shared memory, registers, spills, and whether descriptor loads reached the hardware."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.compile.targets import Target

__all__ = ["captured", "facts_of", "has_block_loads"]

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_AMD = {"registers": r"\.vgpr_count:\s*(\d+)", "spills": r"; ScratchSize: (\d+)"}


@contextmanager
def captured() -> Iterator[list[tuple[str, Any]]]:
    """Within: a kernel launched from the host is compiled and kept as (name, compiled), and not launched."""
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        built = launch(self, *args, **{**options, "warmup": True})
        compiled.append((self.fn.__name__, built))
        return built

    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = launch


def facts_of(built: Any, target: Target) -> dict[str, Any]:
    """What one compiled kernel says of itself.

    `shared` bytes of shared memory and whether it `fits`; `registers` per thread; `spills` bytes per thread (on NVIDIA
    the stack, its proxy); `threads` of a block; `block_loads`: None where the kernel loads nothing through descriptors
    or the target has no such hardware, else whether descriptor loads became the hardware's block loads.
    """
    meta, asm = built.metadata, built.asm
    shared = int(getattr(meta, "shared", 0) or 0)
    facts: dict[str, Any] = {
        "shared": shared,
        "fits": shared <= target.shared,
        "threads": int(meta.num_warps) * target.warp,
        "registers": None,
        "spills": None,
        "block_loads": _block_loads(asm, target),
    }
    if "cubin" in asm:
        facts |= _nvidia(asm["cubin"])
    elif isinstance(asm.get("amdgcn"), str):
        found = {name: re.search(pattern, asm["amdgcn"]) for name, pattern in _AMD.items()}
        facts |= {name: int(match.group(1)) for name, match in found.items() if match}
    return facts


def has_block_loads(target: Target) -> bool:
    """Whether a target's hardware has block loads that descriptor loads should become."""
    return target.block_loads is not None


def _nvidia(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False)
    match = _RESOURCES.search(said.stdout)
    return {"registers": int(match.group(1)), "spills": int(match.group(2))} if match else {}


def _block_loads(asm: Any, target: Target) -> bool | None:
    place = target.block_loads
    source = str(asm.get("ttir", asm.get("ttgir", "")))  # Gluon begins at the latter
    if place is None or not any(word in source for word in ("tt.descriptor_load", "async_tma_copy_global_to_local")):
        return None
    return re.search(place[1], str(asm.get(place[0], ""))) is not None
