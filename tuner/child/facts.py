"""Compile without launching, and what the compiled kernel says about itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["CompileOnly", "compile_facts", "stub_driver"]


class _StubDriver:
    """The three questions that a warm-up asks of a driver, answered for a device that is not touched."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """The target that was asked for."""
        return self._target

    def get_current_device(self) -> int:
        """Always device 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Always the default stream."""
        del device
        return 0

    def is_active(self) -> bool:
        """As a real driver that found its device."""
        return True


def stub_driver(backend: str, arch: str, warp: int) -> None:
    """Make Triton compile for (backend, arch, warp size), such as ("cuda", "90", 32), whatever this machine has."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, warp)
    driver.set_active(_StubDriver(target))  # type: ignore[arg-type]


@dataclass
class CompileOnly:
    """Stands where a jitted kernel stood: a launch compiles and keeps what came out."""

    name: str
    kernel: Any
    compiled: list[tuple[str, Any]]

    def __getitem__(self, grid: Any) -> Any:
        def warm(*args: Any, **options: Any) -> Any:
            built = self.kernel.warmup(*args, grid=grid, **options)
            self.compiled.append((self.name, built))
            return built

        return warm


@contextmanager
def _swapped(modules: Sequence[Any]) -> Iterator[list[tuple[str, Any]]]:
    """Within: every kernel of the modules only compiles when it is launched from the host."""
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    real = [(m, name, value) for m in modules for name, value in vars(m).items() if isinstance(value, JITFunction)]
    launched = [(m, name, value) for m, name, value in real if value.fn.__module__ == m.__name__]
    for module, name, value in launched:
        setattr(module, name, CompileOnly(name, value, compiled))
    try:
        yield compiled
    finally:
        for module, name, value in launched:
            setattr(module, name, value)


def compile_facts(modules: Sequence[Any], kernel: str, launch: Callable[[], Any]) -> dict[str, Any]:
    """Run `launch()` with the kernels of `modules` replaced by compile-only ones; returns what the compiler says.

    The facts are those of `kernel`; what else the launch needs is compiled too. `hash` identifies the binary, `shared`
    is bytes of shared memory, `tmem` columns of tensor memory, `threads` of one block, `spill_bytes` per thread (None
    where the compiler does not say).
    """
    begin = time.perf_counter()
    with _swapped(modules) as compiled:
        launch()
    mine = [built for name, built in compiled if name == kernel]
    if len(mine) != 1:
        raise RuntimeError(f"one launch must compile {kernel} once, not {len(mine)} times")
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
    text = built.asm.get("amdgcn") if hasattr(built, "asm") else None
    if isinstance(text, str):
        for line in text.splitlines():
            if "ScratchSize:" in line:
                return int(line.rsplit(":", 1)[1].strip() or 0)
    return None
