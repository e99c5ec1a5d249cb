"""Another engine's fused-MoE kernel behind our interface: what SGLang's and vLLM's adapters share.

The kernel comes from the engine itself where the child runs in its environment (`--python`); elsewhere from a kernel
file of its wheel, named by an environment variable, whose imports are answered by stand-ins: only the kernel and its
launcher are used, never the engine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from moegate import canonical
from moegate.errors import InfraError, UsageError
from tuner.engines.base import THROUGH_FP8_LIMITS, AdapterBase, Batch, Routes, Verdict, compare
from tuner.engines.quantised import Operand, block_of, make_weight, quantise, rounded
from tuner.engines.quantised import expert as expert_weight
from tuner.problem import Problem, Projection
from xkernels.ops.align import Alignment, moe_align_block_size

__all__ = ["ForeignExperts", "Kernel", "Source", "capability", "load_kernel"]

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_WEIGHT_SCALE, _INPUT_SCALE = 1 / 16, 1 / 8


@dataclass(frozen=True)
class Source:
    """Where an engine's kernel lives: its module, the variable that names a file instead, and stand-ins' answers."""

    engine: str
    module: str
    variable: str
    kernel: str
    answers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel module. `file` is hashed."""

    module: Any
    file: Path
    stand_ins: bool


def capability(least: int) -> bool:
    """Whether the target of this process (a device, or the one that is compiled for) is NVIDIA's and at least that."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # no driver: interpreted
        return False
    return bool(target.backend == "cuda" and int(target.arch) >= least)


class _StandIn(ModuleType):
    """Answers any attribute with something that does nothing; `answers` win."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._answers.get(name, _Nothing())


class _Nothing:
    """Falsy, callable, with any attribute."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **options: Any) -> Any:
        # Used as a decorator it must give the function back.
        return args[0] if len(args) == 1 and callable(args[0]) and not options else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __or__(self, other: Any) -> _Nothing:
        return self

    __ror__ = __or__


class _StandInFinder:
    """Answers every import below one package with a stand-in."""

    def __init__(self, package: str, answers: Mapping[str, Any]) -> None:
        self.package, self.answers = package, answers

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for names below the package."""
        del path, target
        if name.split(".")[0] != self.package:
            return None
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        """A stand-in."""
        return _StandIn(spec.name, self.answers)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def load_kernel(source: Source) -> Kernel:
    """Load an engine's kernel module. InfraError where neither the engine nor a kernel file is there."""
    path = os.environ.get(source.variable)
    if path is None:
        try:
            module = importlib.import_module(source.module)
        except ImportError as error:
            raise InfraError(
                f"{source.engine} is not importable here: {error} (fix: give --python of its environment, or set "
                f"{source.variable} to the kernel file of its wheel)"
            ) from None
        return Kernel(module, Path(str(module.__file__)), False)
    file = Path(path)
    if not file.is_file():
        raise UsageError("is no file", file=file, field=source.variable)
    finder = _StandInFinder(source.module.split(".")[0], source.answers)
    sys.meta_path.insert(0, finder)
    try:
        spec = importlib.util.spec_from_file_location(f"tuner_{source.engine}_kernel", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.meta_path.remove(finder)
    return Kernel(module, file, True)


class ForeignExperts(AdapterBase, ABC):
    """Routed experts by another engine's kernel: gate rows before up rows, activation as a step of its own.

    FP8 rows are quantised before the kernel is timed: what that costs is the same for every config.
    """

    def __init__(self, source: Source, problem: Problem) -> None:
        if problem.op != "fused_experts":
            raise UsageError(f"{source.engine} has no tunable kernel for {problem.op} here", field="--op")
        self.fp8, self.block = problem.dtype.startswith("fp8"), block_of(problem)
        self.engine, self.problem = source.engine, problem
        self.source, self.kernel = source, load_kernel(source)
        self.dtype: torch.dtype = getattr(torch, problem.activation_dtype)
        self.compute = _COMPUTE[self.dtype]
        self.weights: list[tuple[Operand, Operand]] = []
        self.device = torch.device("cpu")
        self.seed = 0
        # The token counts would be specialised by divisibility: three binaries a config, for the same code.
        jitted = getattr(self.kernel.module, source.kernel)
        unspecialised = triton.jit(jitted.fn, do_not_specialize=["EM", "num_valid_tokens"])
        setattr(self.kernel.module, source.kernel, unspecialised)

    def kernel_hash(self) -> str:
        """The kernel's file."""
        return canonical.file_digest(self.kernel.file)

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        """Random weights w1 [E, 2N, H] and w2 [E, H, N]."""
        p = self.problem
        self.device, self.seed, self.weights = device, seed, []
        for copy in range(copies):
            generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed + copy)
            pair = [self._weight(shape, generator) for shape in ((p.E, 2 * p.N, p.H), (p.E, p.H, p.N))]
            self.weights.append((pair[0], pair[1]))
        return sum(weight.values.nbytes for weight in self.weights[0])

    def batch(self, size: int, routes: Routes) -> Batch:
        """Inputs for `size` tokens."""
        meta = self.device.type == "meta"
        generator = None if meta else torch.Generator(self.device).manual_seed(self.seed + 7 * size)
        return ForeignBatch(self, self.random((size, self.problem.H), _INPUT_SCALE, generator), routes)

    def kernels_of(self, projection: Projection) -> tuple[str, ...]:
        """One kernel serves both projections."""
        del projection
        return (self.source.kernel,)

    def helpers(self, block: int) -> Sequence[Callable[[], object]]:
        """Our own sorting, which runs before the engine's kernel."""
        shape = (self.problem.topk,)
        ids = [torch.empty(tokens, *shape, dtype=torch.int32, device="meta") for tokens in (1, 4096)]
        return [functools.partial(moe_align_block_size, i, block, self.problem.E) for i in ids] if block else []

    def simulate(self, target: Mapping[str, Any]) -> None:
        """The launcher asks nothing of the device that stand-ins do not answer, and the driver is a stub already."""
        self.device = torch.device("meta" if target else "cpu")

    def _weight(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Operand:
        if not self.fp8:
            return Operand(self.random(shape, _WEIGHT_SCALE, generator))
        return make_weight(self.random(shape, 1.0, generator), self.block, _WEIGHT_SCALE)

    def rows(self, x: torch.Tensor) -> Operand:
        """Activations as the kernel takes them."""
        return quantise(x, self.block) if self.fp8 else Operand(x)

    @abstractmethod
    def invoke(self, a: Operand, b: Operand, out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
               alignment: Alignment, config: dict[str, Any], *, up: bool, tma: bool, sorted_out: bool,
               topk: int) -> None:  # fmt: skip
        """Launch the kernel; the engine's leaf knows the launcher's arguments."""

    def random(self, shape: tuple[int, ...], scale: float, generator: torch.Generator | None) -> torch.Tensor:
        """Normal values times `scale`; uninitialised on the meta device."""
        if generator is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return (torch.randn(shape, device=self.device, generator=generator) * scale).to(self.dtype)


class ForeignBatch:
    """One batch size of another engine's kernel."""

    def __init__(self, adapter: ForeignExperts, x: torch.Tensor, routes: Routes) -> None:
        self.adapter, self.x, self._routes = adapter, x, routes
        self.size, self.routes = x.shape[0], len(routes)
        self._alignments: dict[tuple[int, int], Alignment] = {}
        self._references: dict[str, torch.Tensor] = {}
        self._hidden: dict[tuple[int, bool], Operand] = {}
        self._rows = adapter.rows(x)

    def launch(self, projection: Projection, config: Mapping[str, Any], route: int) -> torch.Tensor:
        """Up: [M, topk, 2N]. Down: [M, topk, H], times the router weight, from activations in flat or sorted order."""
        if projection == "up":
            return self._up(config, route, sorted_out=False)
        tma = bool(config.get("USE_TMA", False))
        return self._down(self._activations(config, tma), config, route)

    def check(self, projection: Projection, config: Mapping[str, Any], out: torch.Tensor) -> Verdict:
        """Against the float32 twin."""
        return compare(out.flatten(0, 1), self._reference(projection), self.adapter.problem.dtype)

    def whole(self, configs: Mapping[Projection, Mapping[str, Any]], route: int) -> torch.Tensor:
        """Up, activation, down, sum. The activation is torch's: the same for every config."""
        tma = bool(configs["down"].get("USE_TMA", False))
        up = self._up(configs["up"], route, sorted_out=tma, rows=self.adapter.rows(self.x))
        flat = up.flatten(0, 1) if up.ndim == 3 else up
        gate, value = flat.chunk(2, -1)
        hidden = (torch.nn.functional.silu(gate.float()) * value.float()).to(self.x.dtype)
        return self._down(self.adapter.rows(hidden), configs["down"], route).sum(1)

    def check_whole(self, out: torch.Tensor) -> Verdict:
        """Against the float32 twin."""
        down = self._reference("down").view(self.size, -1, self.adapter.problem.H)
        limits = THROUGH_FP8_LIMITS if self.adapter.fp8 else None
        return compare(out, down.sum(1), self.adapter.problem.dtype, limits)

    def _up(
        self, config: Mapping[str, Any], route: int, *, sorted_out: bool, rows: Operand | None = None
    ) -> torch.Tensor:
        weights, ids = self._routes[route]
        alignment = self._alignment(int(config["BLOCK_SIZE_M"]), route)
        n2 = 2 * self.adapter.problem.N
        shape = (alignment.sorted_ids.numel(), n2) if sorted_out else (*ids.shape, n2)
        out = torch.empty(shape, dtype=self.x.dtype, device=self.x.device)
        self.adapter.invoke(
            rows or self._rows, self._weights(route)[0], out, weights, ids, alignment, _bare(config), up=True,
            tma=bool(config.get("USE_TMA", False)), sorted_out=sorted_out, topk=ids.shape[1],
        )  # fmt: skip
        return out

    def _down(self, hidden: Operand, config: Mapping[str, Any], route: int) -> torch.Tensor:
        weights, ids = self._routes[route]
        out = torch.empty(*ids.shape, self.adapter.problem.H, dtype=self.x.dtype, device=self.x.device)
        self.adapter.invoke(
            hidden, self._weights(route)[1], out, weights, ids, self._alignment(int(config["BLOCK_SIZE_M"]), route),
            _bare(config), up=False, tma=bool(config.get("USE_TMA", False)), sorted_out=False, topk=1,
        )  # fmt: skip
        return out

    def _activations(self, config: Mapping[str, Any], in_order: bool) -> Operand:
        """Route 0's true activations, flat, or in sorted order where descriptors walk them."""
        key = (int(config["BLOCK_SIZE_M"]) if in_order else 0, in_order)
        if key not in self._hidden:
            meta = self.x.device.type == "meta"
            flat = self._routes[0][1].numel()
            alignment = self._alignment(int(config["BLOCK_SIZE_M"]), 0)
            rows = alignment.sorted_ids.numel() if in_order else flat
            hidden = torch.zeros(rows, self.adapter.problem.N, dtype=self.x.dtype, device=self.x.device)
            if not meta:
                act = self._reference("act").to(self.x.dtype)
                used = alignment.sorted_ids.long()
                places = torch.nonzero(used < flat).flatten()
                if in_order:
                    hidden[places] = act[used[places]]
                else:
                    hidden.copy_(act)
            self._hidden[key] = self.adapter.rows(hidden)
        return self._hidden[key]

    def _alignment(self, block_m: int, route: int) -> Alignment:
        key = (block_m, route)
        if key not in self._alignments:
            ids = self._routes[route][1]
            if ids.device.type == "meta":
                blocks = ids.numel() + self.adapter.problem.E
                made = [torch.empty(n, dtype=torch.int32, device="meta") for n in (blocks * block_m, blocks, 1)]
                self._alignments[key] = Alignment(made[0], made[1], made[2], block_m)
            else:
                self._alignments[key] = moe_align_block_size(ids, block_m, self.adapter.problem.E)
        return self._alignments[key]

    def _weights(self, route: int) -> tuple[Operand, Operand]:
        return self.adapter.weights[route % len(self.adapter.weights)]

    def _reference(self, what: str) -> torch.Tensor:
        """float32, in the order of the flattened routing: `up` [M * topk, 2N], `act` [.., N], `down` [.., H]."""
        if what not in self._references:
            weights, ids = self._routes[0]
            flat, (w1, w2) = ids.flatten().long(), self._weights(0)
            p, block = self.adapter.problem, self.adapter.block
            x = rounded(self.x, block) if self.adapter.fp8 else self.x.float()
            up = torch.zeros(flat.numel(), 2 * p.N, device=self.x.device)
            down = torch.zeros(flat.numel(), p.H, device=self.x.device)
            for expert in flat[flat >= 0].unique().tolist():
                slots = torch.nonzero(flat == expert).flatten()
                up[slots] = x[slots // ids.shape[1]] @ expert_weight(w1, expert, block).T
            gate, value = up.to(self.x.dtype).float().chunk(2, -1)  # it lies in memory between the steps
            act = torch.nn.functional.silu(gate) * value
            narrow = act.to(self.x.dtype)
            narrow = rounded(narrow, block) if self.adapter.fp8 else narrow.float()
            for expert in flat[flat >= 0].unique().tolist():
                slots = torch.nonzero(flat == expert).flatten()
                row_weights = weights.flatten()[slots, None]
                down[slots] = (narrow[slots] @ expert_weight(w2, expert, block).T) * row_weights
            self._references = {"up": up, "act": act, "down": down}
        return self._references[what]


def _bare(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "USE_TMA"}
