"""moegate's ops of one kernel: the block-FP8 linear layer, and the store of keys and values into their cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moegate.errors import UsageError
from moegate.kernels import hash_of, kernel_files
from tuner.engines.base import AdapterBase, Routes, Verdict, compare
from tuner.kernel_names import LINEAR, STORE
from tuner.problem import Problem, Projection
from xkernels.ops.kv_cache import store_kv_cache, store_kv_cache_reference
from xkernels.ops.linear import (
    PreparedLinear,
    block_fp8_linear,
    block_fp8_linear_reference,
    default_linear_config,
    prepare_block_fp8,
)
from xkernels.ops.quant import per_token_group_quant_fp8
from xkernels.ops.scheme import BLOCK_K

__all__ = ["OneKernel", "make_linear", "make_store"]

_WEIGHT_SCALE, _INPUT_SCALE = 1 / 16, 1 / 8
_SLOTS = 16384


def make_linear(problem: Problem) -> BlockLinear:
    """The adapter of `block_fp8_linear`; UsageError for a block shape without a kernel."""
    if problem.block_shape not in ((BLOCK_K, BLOCK_K), (1, BLOCK_K)):
        raise UsageError(f"block shape {problem.block_shape} has no kernel", field="--shape", fix="[128, 128]")
    if problem.H % BLOCK_K:
        raise UsageError(f"K must be a multiple of {BLOCK_K}, not {problem.H}", field="--shape")
    return BlockLinear(problem)


def make_store(problem: Problem) -> StoreCache:
    """The adapter of `store_kv_cache`; UsageError for a quantised cache."""
    if problem.dtype.startswith("fp8"):
        raise UsageError("a cache is stored as float32, float16 or bfloat16", field="--dtype", fix="bfloat16")
    return StoreCache(problem)


class OneKernel(AdapterBase):
    """What ops of one kernel share: one projection called `main`, batches that rotate through several inputs."""

    engine = "moegate"
    kernel = ""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype: torch.dtype = getattr(torch, problem.activation_dtype)
        self.device = torch.device("cpu")
        self.seed, self.copies = 0, 1

    def kernel_hash(self) -> str:
        """Sources of the kernel, its helpers and its launcher."""
        return hash_of(self.kernel_files())

    def kernel_files(self) -> Mapping[str, str]:
        """Sources of the kernel, its helpers and its launcher."""
        return kernel_files(self.problem.op)

    def kernels_of(self, projection: Projection) -> tuple[str, ...]:
        """The one kernel."""
        del projection
        return (self.kernel,)

    def simulate(self, target: Mapping[str, Any]) -> None:
        """The launchers ask nothing of the device that the stub driver does not answer."""

    def random(self, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values times `scale`, the same for the same seed; uninitialised on the meta device."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed * 1009 + seed)
        return (torch.randn(shape, device=self.device, generator=generator) * scale).to(self.dtype)


class BlockLinear(OneKernel):
    """x [M, K] @ weight [N, K].T in FP8, scales per 128 columns; the GEMM alone is timed, as the engines' tuners do."""

    kernel = LINEAR

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.weights: list[PreparedLinear] = []

    def default(self, size: int) -> Mapping[str, Any]:
        """The launcher's own rule, its choice of operands spelled out."""
        config = default_linear_config(size)
        return {**config, "SWAP_AB": config["BLOCK_SIZE_M"] < 64 <= config["BLOCK_SIZE_N"]}

    def helpers(self, block: int) -> Sequence[Callable[[], object]]:
        """Quantisation of the rows."""
        rows = torch.empty(64, self.problem.H, dtype=self.dtype, device="meta")
        return [] if block else [partial(per_token_group_quant_fp8, rows, BLOCK_K, dtype=self.weights[0].weight.dtype)]

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        """Random weights and scales; bytes of one set."""
        p, block = self.problem, self.problem.block_shape
        assert block is not None
        self.device, self.seed, self.copies = device, seed, copies
        scales = (-(-p.N // block[0]), p.H // block[1])
        self.weights = []
        for copy in range(copies):
            weight = self.random((p.N, p.H), copy).to(torch.float8_e4m3fn)
            scale = (self.random(scales, 100 + copy).float().abs() + 0.5) * _WEIGHT_SCALE
            self.weights.append(prepare_block_fp8(weight, scale, block))
        return self.weights[0].weight.nbytes + self.weights[0].scale.nbytes

    def batch(self, size: int, routes: Routes) -> LinearBatch:
        """Rows of `size` tokens."""
        return LinearBatch(self, size, len(routes))


class _Batch(ABC):
    """One batch size of an op of one kernel."""

    def __init__(self, size: int, routes: int) -> None:
        self.size, self.routes = size, routes

    def whole(self, configs: Mapping[Projection, Mapping[str, Any]], route: int) -> torch.Tensor:
        """The op as it is called."""
        return self.call(configs["main"], route)

    @abstractmethod
    def call(self, config: Mapping[str, Any] | None, route: int) -> torch.Tensor:
        """The op with one config (None: its default)."""


class LinearBatch(_Batch):
    """One batch size of the linear layer."""

    def __init__(self, adapter: BlockLinear, size: int, routes: int) -> None:
        super().__init__(size, routes)
        self.adapter = adapter
        self.x = adapter.random((size, adapter.problem.H), 7 * size, _INPUT_SCALE)
        self._reference: torch.Tensor | None = None
        self._layouts: dict[int, PreparedLinear] = {}
        fp8 = adapter.weights[0].weight.dtype
        if adapter.device.type == "meta":
            scale = torch.empty(size, adapter.problem.H // BLOCK_K, device="meta")
            self._rows = (torch.empty(self.x.shape, dtype=fp8, device="meta"), scale)
        else:
            self._rows = per_token_group_quant_fp8(self.x, BLOCK_K, dtype=fp8)

    def launch(self, projection: Projection, config: Mapping[str, Any], route: int) -> torch.Tensor:
        """The GEMM on rows that are quantised already."""
        del projection
        rows, scale = self._rows
        return block_fp8_linear(
            rows, self._weight(route), backend="triton", x_scale=scale, out_dtype=self.x.dtype, config=config
        )

    def call(self, config: Mapping[str, Any] | None, route: int) -> torch.Tensor:
        """Quantise and multiply."""
        return block_fp8_linear(self.x, self._weight(route), backend="triton", config=config)

    def whole_by(self, backend: str, route: int) -> torch.Tensor:
        """The op by a backend that reads no config."""
        weight = self._weight(route)
        return block_fp8_linear(self.x, self._moved(weight) if backend == "scaled_mm" else weight, backend=backend)

    def check(self, projection: Projection, config: Mapping[str, Any], out: torch.Tensor) -> Verdict:
        """Against the float32 twin."""
        del projection, config
        return self.check_whole(out)

    def check_whole(self, out: torch.Tensor) -> Verdict:
        """Against the float32 twin."""
        if self._reference is None:
            self._reference = block_fp8_linear_reference(self.x, self.adapter.weights[0], out_dtype=torch.float32)
        return compare(out, self._reference, self.adapter.problem.dtype)

    def _moved(self, weight: PreparedLinear) -> PreparedLinear:
        """The same weights with their scales where torch's scaled_mm wants them; made once."""
        if id(weight) not in self._layouts:
            assert weight.block is not None
            self._layouts[id(weight)] = prepare_block_fp8(weight.weight, weight.scale, weight.block, "scaled_mm")
        return self._layouts[id(weight)]

    def _weight(self, route: int) -> PreparedLinear:
        return self.adapter.weights[route % len(self.adapter.weights)]


class StoreCache(OneKernel):
    """Keys and values [M, heads * dim] to random slots of their caches; its one parameter is `num_split`."""

    kernel = STORE

    def default(self, size: int) -> Mapping[str, Any]:
        """The launcher's own rule."""
        del size
        return {"num_split": -(-self.problem.N * self.problem.H // 4096)}

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        """No weights: the caches are larger than any cache of the device, and slots are drawn at random."""
        self.device, self.seed, self.copies = device, seed, copies
        return 1 << 40

    def batch(self, size: int, routes: Routes) -> StoreBatch:
        """Rows and slots of `size` tokens."""
        return StoreBatch(self, size, len(routes))


class StoreBatch(_Batch):
    """One batch size of the store."""

    def __init__(self, adapter: StoreCache, size: int, routes: int) -> None:
        super().__init__(size, routes)
        self.adapter = adapter
        width = adapter.problem.N * adapter.problem.H
        self.rows = [adapter.random((size, width), 2 * route + size) for route in range(routes)]
        slots = max(_SLOTS, 2 * size)
        self.caches = [torch.zeros(slots, width, dtype=adapter.dtype, device=adapter.device) for _ in range(2)]
        if adapter.device.type == "meta":
            self.indices = [torch.empty(size, dtype=torch.int32, device="meta")] * routes
        else:
            generator = torch.Generator("cpu").manual_seed(adapter.seed + size)
            draws = [torch.randperm(slots - 1, generator=generator)[:size] + 1 for _ in range(routes)]
            self.indices = [draw.int().to(adapter.device) for draw in draws]

    def launch(self, projection: Projection, config: Mapping[str, Any], route: int) -> torch.Tensor:
        """One store of both."""
        del projection
        return self.call(config, route)

    def call(self, config: Mapping[str, Any] | None, route: int) -> torch.Tensor:
        """Store and return the key cache."""
        rows, split = self.rows[route], int((config or {}).get("num_split", 0))
        store_kv_cache(rows, rows, self.caches[0], self.caches[1], self.indices[route], num_split=split)
        return self.caches[0]

    def whole_by(self, backend: str, route: int) -> torch.Tensor:
        """The op by a backend that reads no config: in plain torch, the backends `torch` and `reference` are one."""
        if backend not in ("torch", "reference"):
            raise UsageError(f"{backend} does not store a cache", field="--moe-runner-backend", fix="triton or torch")
        rows = self.rows[route]
        store_kv_cache_reference(rows, rows, self.caches[0], self.caches[1], self.indices[route])
        return self.caches[0]

    def check(self, projection: Projection, config: Mapping[str, Any], out: torch.Tensor) -> Verdict:
        """Store once more into caches of NaN: the rows must be there, exactly, and nothing else."""
        del projection, out
        for cache in self.caches:
            cache.fill_(float("nan"))
        self.call(config, 0)
        verdict = self._stored()
        for cache in self.caches:
            cache.zero_()
        return verdict

    def check_whole(self, out: torch.Tensor) -> Verdict:
        """What was stored at the slots of route 0."""
        del out
        return self._stored(others=False)

    def _stored(self, others: bool = True) -> Verdict:
        at = self.indices[0].long()
        verdicts = [compare(cache[at], self.rows[0].float(), self.adapter.problem.dtype) for cache in self.caches]
        worst = max(verdicts, key=lambda verdict: verdict.max_rel)
        written = [int(torch.isfinite(cache).all(1).sum()) for cache in self.caches] if others else [self.size]
        if worst.ok and (worst.max_rel > 0 or any(count != self.size for count in written)):
            return Verdict(False, worst.max_rel, worst.rms, 0, f", {written} rows written of {self.size}")
        return worst
