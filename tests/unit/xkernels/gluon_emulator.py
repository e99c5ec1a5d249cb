"""Runs a warp-specialised Gluon kernel's parts as threads over numpy, to test its barriers and arithmetic off a device.

Copies land late and in any order, products are computed when they are waited for, and every barrier counts arrivals,
bytes and phases, so a stage given back too early shows as a wrong result and a lost arrival as a hang with a deadline.
Layouts are ignored, and so are proxies: this cannot find a missing fence.
"""

from __future__ import annotations

import random
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

BITS = {"bf16": 16, "fp8": 8, "f32": 32, "i32": 32, "i64": 64}
DEADLINE_S = 60.0


class Dtype:
    def __init__(self, name: str) -> None:
        self.name, self.primitive_bitwidth, self.element_ty = name, BITS[name], self

    def round(self, x: Any) -> Any:
        kinds = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
        if self.name in kinds:
            return np.asarray(torch.from_numpy(np.array(x, np.float32)).to(kinds[self.name]).float().numpy())
        return np.asarray(x).astype({"f32": np.float32, "i32": np.int32, "i64": np.int64}[self.name])


class Value(np.ndarray):
    """A tensor or scalar that nothing changes in place."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(Value)

    def __iadd__(self, other: Any) -> Any:
        return value(self + other)

    def __imul__(self, other: Any) -> Any:
        return value(self * other)

    def to(self, dtype: Dtype) -> Any:
        return value(dtype.round(self))

    def permute(self, *axes: int) -> Any:
        return value(np.transpose(self, axes))

    def split(self) -> Any:
        return value(self[..., 0]), value(self[..., 1])

    def reshape(self, *shape: int) -> Any:
        return value(np.reshape(np.asarray(self), shape))

    type = types.SimpleNamespace(layout=None)


def value(x: Any) -> Any:
    return np.asarray(x).view(Value)


class Pointer:
    def __init__(self, data: Any, dtype: Dtype, at: Any = 0) -> None:
        self.data, self.dtype, self.at = data, dtype, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.data, self.dtype, np.asarray(self.at) + np.asarray(other))


class Barrier:
    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.phase = self.bytes = self.pending = self.count = 0

    def init(self, count: int) -> None:
        self.count = self.pending = int(count)

    def update(self, arrivals: int = 0, more_bytes: int = 0) -> None:
        with self.lock:
            self.pending -= arrivals
            self.bytes += more_bytes
            assert self.pending >= 0, "an arrival too many in this phase"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.lock.notify_all()

    def wait(self, parity: int) -> None:
        with self.lock:
            if not self.lock.wait_for(lambda: (self.phase - 1) & 1 == parity, DEADLINE_S):
                raise TimeoutError("barrier")


class Shared:
    """Buffers of one allocation, or one of them; barriers where they are 64-bit words."""

    def __init__(self, cells: list[Any], dtype: Dtype) -> None:
        self.cells, self.dtype = cells, dtype

    def index(self, i: Any) -> Any:
        return self.cells[int(i)]


class Cell:
    def __init__(self, shape: list[int], dtype: Dtype) -> None:
        self.data, self.dtype, self.barrier = np.full(shape, np.nan if dtype.name != "i64" else 0), dtype, Barrier()
        if dtype.name != "i64":
            self.data = self.data.astype(np.float32)

    def load(self, layout: Any) -> Any:
        time.sleep(2e-4)  # longer than a stage takes that was given back too early to be filled anew
        return value(self.data.copy())

    def store(self, x: Any) -> None:
        self.data[...] = self.dtype.round(x)

    def permute(self, axes: Any) -> Any:
        return ("transposed", self)


class Descriptor:
    def __init__(self, data: Any, block: list[int], dtype: Dtype) -> None:
        self.data, self.block, self.dtype, self.layout = data, block, dtype, None

    def window(self, at: Any) -> tuple[Any, Any]:
        (r, c), (h, w) = (int(i) for i in at), self.block
        return slice(r, min(r + h, self.data.shape[0])), slice(c, min(c + w, self.data.shape[1]))


class Emulator:
    """One launch: its copies in flight, its random delays, and the language as its functions see it."""

    def __init__(self, seed: int) -> None:
        self.pool, self.random, self.local = ThreadPoolExecutor(8), random.Random(seed), threading.local()
        self.atomic = threading.Lock()
        self.errors: list[BaseException] = []
        self.arriving: list[threading.Thread] = []

    def kept(self, work: Callable[..., Any]) -> Callable[..., None]:
        """The work for a thread of its own, whose error the launch raises."""

        def run(*args: Any) -> None:
            try:
                work(*args)
            except BaseException as error:
                self.errors.append(error)

        return run

    def nap(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 1e-4)

    def gl(self) -> Any:
        ns = types.SimpleNamespace()
        for name in BITS:
            setattr(
                ns, {"f32": "float32", "i32": "int32", "i64": "int64", "bf16": "bfloat16"}.get(name, name), Dtype(name)
            )
        for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
                     "SwizzledSharedLayout", "DistributedLinearLayout"):  # fmt: skip
            setattr(ns, name, lambda *a, **k: None)
        ns.constexpr, ns.static_range = (lambda x: x), range
        ns.arange = lambda a, b, layout=None: value(np.arange(a, b))
        ns.zeros = lambda shape, dtype, layout=None: value(np.zeros(shape, np.float32))
        ns.full = lambda shape, x, dtype, layout=None: value(np.full(shape, x))
        ns.full_like = lambda x, v: value(np.full_like(x, v))
        ns.where = lambda c, a, b: value(np.where(c, a, b))
        ns.minimum, ns.maximum = (lambda a, b: value(np.minimum(a, b))), (lambda a, b: value(np.maximum(a, b)))
        ns.abs, ns.max = (lambda x: value(np.abs(x))), (lambda x, axis: value(np.max(x, axis)))
        ns.div_rn = lambda a, b: value((np.float32(a) / np.float32(b)).astype(np.float32))
        ns.fma = lambda a, b, c: value((np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32))
        ns.convert_layout = lambda x, layout: x
        ns.load, ns.store, ns.atomic_add = self.load, self.store, self.add
        ns.num_programs = lambda axis: value(np.int32(self.programs))
        ns.program_id = lambda axis: value(np.int32(self.program))
        ns.inline_asm_elementwise = self.asm
        ns.allocate_shared_memory = lambda dtype, shape, layout: Shared(
            [Cell(shape[1:], dtype) for _ in range(shape[0])], dtype
        )
        ns.warp_specialize = self.specialize
        return ns

    def load(self, at: Pointer, mask: Any = True, other: float = 0.0) -> Any:
        where, mask = np.broadcast_arrays(np.asarray(at.at), np.asarray(mask))
        assert not ((where < 0) | (where >= at.data.size))[mask].any(), "load out of bounds"
        return value(np.where(mask, at.data[np.where(mask, where, 0)], at.data.dtype.type(other)))

    def store(self, at: Pointer, x: Any, mask: Any = True) -> None:
        where, mask, x = np.broadcast_arrays(np.asarray(at.at), np.asarray(mask), np.asarray(at.dtype.round(x)))
        assert not ((where < 0) | (where >= at.data.size))[mask].any(), "store out of bounds"
        at.data[where[mask]] = x[mask]

    def add(self, at: Pointer, x: int, sem: str = "acq_rel") -> Any:
        del sem
        with self.atomic:
            old = at.data[int(at.at)]
            at.data[int(at.at)] += x
        return value(np.int32(old))

    def asm(self, text: str, constraints: str, args: list[Any], **_: Any) -> Any:
        if text.startswith("griddepcontrol"):
            return args[0]
        one = {"ex2": np.exp2, "rcp": lambda x: 1 / x, "mov": lambda x: x}[text[:3]]
        with np.errstate(over="ignore"):
            return value(one(np.asarray(args[0], np.float32)).astype(np.float32))

    def specialize(self, parts: list[Any], warps: list[int], registers: list[int]) -> None:
        def run(function: Callable[..., Any], args: Any) -> None:
            self.local.copies, self.local.groups, self.local.products = [], [], []
            function(*args)

        threads = [threading.Thread(target=self.kept(run), args=part, daemon=True) for part in parts]
        for t in threads:
            t.start()
        for t in (*threads, *self.arriving):
            t.join(3 * DEADLINE_S)
        if self.errors:
            raise self.errors[0]
        assert not any(t.is_alive() for t in threads), "a part hangs"

    def mbarrier(self) -> Any:
        def expect(cell: Any, size: int, pred: Any = True) -> None:
            self.nap()
            if pred:
                cell.barrier.update(1, int(size))

        def arrive(cell: Any, count: int = 1, pred: Any = True) -> None:
            self.nap()
            if pred:
                cell.barrier.update(count)

        def wait(cell: Any, parity: Any) -> None:
            self.nap()
            cell.barrier.wait(int(parity))

        return types.SimpleNamespace(MBarrierLayout=lambda: None, init=lambda c, count: c.barrier.init(count),
                                     expect=expect, arrive=arrive, wait=wait)  # fmt: skip

    def tma(self) -> Any:
        def fetch(desc: Descriptor, at: Any, bar: Any, cell: Cell, pred: Any = True) -> None:
            if not pred:
                return

            def work() -> None:
                self.nap()
                tile = np.zeros(desc.block, np.float32)
                rows, cols = desc.window(at)
                part = desc.data[rows, cols]
                tile[: part.shape[0], : part.shape[1]] = part
                cell.data[...] = tile
                bar.barrier.update(0, -tile.size * desc.dtype.primitive_bitwidth // 8)

            self.pool.submit(self.kept(work))

        def put(desc: Descriptor, at: Any, cell: Cell) -> None:
            rows, cols = desc.window(at)
            desc.data[rows, cols] = cell.data[: rows.stop - rows.start, : cols.stop - cols.start]

        return types.SimpleNamespace(async_copy_global_to_shared=fetch, async_copy_shared_to_global=put,
                                     store_wait=lambda n: None)  # fmt: skip

    def async_copy(self) -> Any:
        def copy(cell: Cell, at: Pointer, mask: Any) -> None:
            def work() -> None:
                self.nap()
                cell.data[...] = self.load(at, mask)

            self.local.copies.append(self.pool.submit(work))

        def arrive(cell: Any, increment_count: bool) -> None:
            copies, self.local.copies = self.local.copies, []

            def work() -> None:
                for c in copies:
                    c.result()
                cell.barrier.update(self.arrivals)

            thread = threading.Thread(target=self.kept(work), daemon=True)
            self.arriving.append(thread)
            thread.start()

        def commit() -> None:
            self.local.groups.append(self.local.copies)
            self.local.copies = []

        def wait(pending: int) -> None:
            while len(self.local.groups) > pending:
                for c in self.local.groups.pop(0):
                    c.result()

        return types.SimpleNamespace(async_copy_global_to_shared=copy, mbarrier_arrive=arrive, commit_group=commit,
                                     wait_group=wait)  # fmt: skip

    def product(self, a: Cell, b: Any, acc: Any, use_acc: bool = True, is_async: bool = True) -> Any:
        lazy = types.SimpleNamespace(a=a, b=b[1], acc=acc, use=use_acc, out=None)
        self.local.products.append(lazy)
        return lazy

    def product_wait(self, pending: int, deps: list[Any]) -> Any:
        waiting = self.local.products
        while len(waiting) > pending:
            p = waiting.pop(0)
            before = p.acc.out if isinstance(p.acc, types.SimpleNamespace) else np.asarray(p.acc)
            p.out = p.a.data @ p.b.data.T + (before if p.use else 0)
        result = deps[0]
        if isinstance(result, types.SimpleNamespace) and result.out is not None:
            return value(result.out.astype(np.float32))
        return result

    def launch(self, kernel: Any, programs: int, arrivals: int, args: dict[str, Any]) -> None:
        """Run `kernel` for each program in turn; other modules of its package that it calls into come along."""
        self.programs, self.arrivals = programs, arrivals
        language = {
            "gl": self.gl(), "mbarrier": self.mbarrier(), "tma": self.tma(), "async_copy": self.async_copy(),
            "fence_async_shared": lambda: None, "warpgroup_mma": self.product, "warpgroup_mma_wait": self.product_wait,
        }  # fmt: skip
        run = _rebound(kernel.fn, language, {})
        with np.errstate(all="ignore"):
            for program in range(programs):
                self.program = program
                run(**args)
        self.pool.shutdown()


def _rebound(function: Any, language: dict[str, Any], spaces: dict[int, dict[str, Any]]) -> Any:
    """A function that sees `language` for Gluon's, and so do the jitted functions it calls; one space per module."""
    source = function.__globals__
    names = spaces.get(id(source))
    if names is None:
        names = spaces[id(source)] = dict(source)
        names.update((name, item) for name, item in language.items() if name in source)
        for name, item in source.items():
            if isinstance(getattr(item, "fn", None), types.FunctionType):
                names[name] = _rebound(item.fn, language, spaces)
            elif type(item).__name__ == "constexpr":
                names[name] = item.value
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
