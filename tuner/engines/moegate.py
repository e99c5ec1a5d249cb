"""moegate's own kernels: `xkernels.ops.fused_experts`, timed as the server runs them (sorted layout, fused gate)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moegate.configs import BATCH_SIZES
from moegate.errors import UsageError
from moegate.kernels import hash_of, kernel_files
from tuner.engines.base import (
    QUANTISED_LIMITS,
    THROUGH_FP8_LIMITS,
    Adapter,
    AdapterBase,
    Batch,
    Routes,
    Verdict,
    compare,
)
from tuner.engines.dense import make_linear, make_store
from tuner.kernel_names import kernels_of
from tuner.problem import Problem, Projection
from xkernels.device import Limits, simulated
from xkernels.ops._details import experts as _experts
from xkernels.ops._details.experts import Rows, down_projection, expert_weights, up_projection
from xkernels.ops.align import Alignment, moe_align_block_size
from xkernels.ops.fused_experts import fused_experts, fused_experts_reference, prepare_experts
from xkernels.ops.prepared import PreparedExperts, deinterleave
from xkernels.ops.quant import per_token_group_quant_fp8, per_token_group_quant_fp8_reference
from xkernels.ops.reduce import moe_sum_reduce
from xkernels.ops.scheme import BLOCK_K, NONE, Scheme

__all__ = ["MoegateExperts", "make"]

_WEIGHT_SCALE = 1 / 16
_INPUT_SCALE = 1 / 8


def make(problem: Problem) -> Adapter:
    """The adapter for `problem`; UsageError where its shape or dtype has no kernel."""
    return _MAKERS[problem.op](problem)


def scheme_of(problem: Problem) -> Scheme:
    """The quantisation scheme of a problem's weights. UsageError for a block shape or a size without a kernel."""
    if not problem.dtype.startswith("fp8"):
        return NONE
    if problem.block_shape is None:
        return Scheme("fp8_tensor")
    if problem.block_shape != (BLOCK_K, BLOCK_K):
        raise UsageError(f"block shape {list(problem.block_shape)} has no kernel", fix=f"[{BLOCK_K}, {BLOCK_K}]")
    for name, size in (("N", problem.N), ("H", problem.H)):
        if size % BLOCK_K:
            raise UsageError(f"{name} must be a multiple of {BLOCK_K} in block FP8, not {size}", field="--shape")
    return Scheme("fp8_block", problem.block_shape)


def _ids(tokens: int, topk: int) -> torch.Tensor:
    return torch.empty(tokens, topk, dtype=torch.int32, device="meta")


@dataclass(frozen=True)
class _Target:
    """The device that is compiled for, as far as the launcher asks."""

    known_features: frozenset[str]
    known_limits: Limits

    def features(self) -> frozenset[str]:
        """As the live device would say."""
        return self.known_features

    def limits(self) -> Limits:
        """As the live device would say."""
        return self.known_limits


class MoegateExperts(AdapterBase):
    """Routed experts in float32, float16, bfloat16 or FP8 (per tensor, or [128, 128] blocks)."""

    engine = "moegate"
    # On an H200 descriptors gained most from 1024 tokens on; where they lose, measuring finds it: both are tried.
    descriptors = frozenset({"pdl"})

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.scheme = scheme_of(problem)
        self.dtype: torch.dtype = getattr(torch, problem.activation_dtype)
        self.weights: list[PreparedExperts] = []
        self.device = torch.device("cpu")
        self.seed = 0

    def kernel_hash(self) -> str:
        """Sources of both projections' kernel, its helpers and its launcher."""
        return hash_of(self.kernel_files())

    def kernel_files(self) -> Mapping[str, str]:
        """Sources of both projections' kernel, its helpers and its launcher."""
        return kernel_files(self.problem.op)

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        """Random weights, the same for the same seed; returns bytes of one set."""
        self.device, self.seed = device, seed
        self.weights = []
        for copy in range(copies):
            generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed + copy)
            self.weights.append(self._prepare(generator))
        first = self.weights[0]
        return first.w1.nbytes + first.w2.nbytes

    def batch(self, size: int, routes: Routes) -> Batch:
        """Inputs for `size` tokens."""
        generator = (
            None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(self.seed + 7 * size)
        )
        x = self._random((size, self.problem.H), generator) * _INPUT_SCALE
        return _ExpertsBatch(self, x.to(self.dtype), routes)

    def kernels_of(self, projection: Projection) -> tuple[str, ...]:
        """The kernels for any rows, for many and for single ones; the config says which of them a launch runs."""
        return kernels_of(projection)

    def helpers(self, block: int) -> Sequence[Callable[[], object]]:
        """Sorting, whose kernels depend on how many tokens; the sum over slots, and quantisation as its own step."""
        p = self.problem
        if block:
            return [partial(moe_align_block_size, _ids(tokens, p.topk), block, p.E) for tokens in BATCH_SIZES]
        calls: list[Callable[[], object]] = [
            partial(moe_sum_reduce, torch.empty(64, p.topk, p.H, dtype=self.dtype, device="meta"), overlap=True)
        ]
        if self.scheme.fp8:
            padded, fp8 = self.weights[0].padded, self.weights[0].w1.dtype
            post = torch.empty(2, dtype=torch.int32, device="meta")
            for tokens, (width, limit) in itertools.product((16, 4096), ((p.H, None), (padded, post))):
                rows = torch.empty(tokens, width, dtype=self.dtype, device="meta")  # few rows take another kernel
                group = BLOCK_K if self.scheme.kind == "fp8_block" else width
                calls.append(partial(per_token_group_quant_fp8, rows, group, dtype=fp8, limit=limit, overlap=True))
        return calls

    def simulate(self, target: Mapping[str, Any]) -> None:
        """In a compile-only child: answer the launcher's questions about the device for one that is not here."""
        device = _Target(frozenset(target["features"]), Limits(*target["limits"]))
        self._simulation = simulated(device)  # type: ignore[arg-type]
        self._simulation.__enter__()  # for the rest of this process

    def _prepare(self, generator: torch.Generator | None) -> PreparedExperts:
        p = self.problem
        w1, w2 = self._random((p.E, 2 * p.N, p.H), generator), self._random((p.E, p.H, p.N), generator)
        if self.scheme.kind == "none":
            return prepare_experts((w1 * _WEIGHT_SCALE).to(self.dtype), (w2 * _WEIGHT_SCALE).to(self.dtype))
        fp8 = torch.float8_e4m3fn
        if self.scheme.kind == "fp8_tensor":
            scale = torch.full((p.E,), _WEIGHT_SCALE, device=self.device)
            return prepare_experts(w1.to(fp8), w2.to(fp8), scheme=self.scheme, w1_scale=scale, w2_scale=scale)
        blocks = [(-(-2 * p.N // BLOCK_K), -(-p.H // BLOCK_K)), (-(-p.H // BLOCK_K), -(-p.N // BLOCK_K))]
        s1, s2 = ((self._random((p.E, *shape), generator).abs() + 0.5) * _WEIGHT_SCALE for shape in blocks)
        return prepare_experts(w1.to(fp8), w2.to(fp8), scheme=self.scheme, w1_scale=s1, w2_scale=s2)

    def _random(self, shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
        if generator is None:
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, device=self.device, generator=generator)


class _ExpertsBatch:
    """One batch size: activations, routings, and per BLOCK_SIZE_M the alignment and the down projection's input."""

    def __init__(self, adapter: MoegateExperts, x: torch.Tensor, routes: Routes) -> None:
        self.adapter, self.x, self._routes = adapter, x, routes
        self.size, self.routes = x.shape[0], len(routes)
        self._alignments: dict[tuple[int, int], Alignment] = {}
        self._hidden: dict[tuple[int, bool], Rows] = {}
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._references: dict[str, torch.Tensor] = {}

    def launch(self, projection: Projection, config: Mapping[str, Any], route: int) -> Any:
        """One GEMM: up with the gated activation, down with the router weight, FP8 quantisation where it is served.

        Where the rows between the projections are FP8, the up projection hands them over so, by itself or by a pass
        after it that counts as its own: else its config would decide what the down projection takes.
        """
        weights, _ = self._routes[route]
        experts = self._experts(route)
        alignment = self.alignment(int(config["BLOCK_SIZE_M"]), route)
        if projection == "up":
            out = up_projection(self.x, experts, weights, alignment, config)
            return self._quantised(out, alignment, config) if self._hands_over_fp8(config) else out
        rows = self.hidden(alignment, config)
        return down_projection(rows, experts, weights, alignment, config, self.x.dtype)

    def _hands_over_fp8(self, config: Mapping[str, Any]) -> bool:
        return self.adapter.scheme.kind == "fp8_block" and not _experts._inline(config, BLOCK_K)

    def _quantised(self, rows: Rows, alignment: Alignment, config: Mapping[str, Any]) -> Rows:
        overlap = _experts.overlaps(config, self.x)
        return _experts._quantize_rows(rows, self.adapter.weights[0], alignment, False, overlap)

    def check(self, projection: Projection, config: Mapping[str, Any], out: Any) -> Verdict:
        """Valid rows only: padding rows of the sorted layout are nobody's result."""
        reference, dtype = self._reference(projection), self.adapter.problem.dtype
        if projection == "down":
            return compare(out.flatten(0, 1), reference, dtype)
        places, slots = self._valid(self.alignment(int(config["BLOCK_SIZE_M"]), 0))
        wanted = reference[slots]
        if out.scale is None:
            return compare(out.values[places, : self.adapter.problem.N], wanted, dtype)
        # The kernel quantised its result: hold it against the quantised reference.
        scales = out.scale[places].repeat_interleave(BLOCK_K, 1)[:, : out.values.shape[1]]
        got = (out.values[places].float() * scales)[:, : self.adapter.problem.N]
        return _nearest(
            compare(got, _rounded(w, BLOCK_K), dtype, QUANTISED_LIMITS) for w in (wanted, wanted.to(self.x.dtype))
        )

    def whole(self, configs: Mapping[Projection, Mapping[str, Any]], route: int) -> torch.Tensor:
        """Align, up, down, combine."""
        weights, ids = self._routes[route]
        return fused_experts(
            self.x, self._experts(route), weights, ids, backend="triton", up=configs["up"], down=configs["down"]
        )

    def whole_by(self, backend: str, route: int) -> torch.Tensor:
        """The op by a backend that reads no config."""
        weights, ids = self._routes[route]
        return fused_experts(self.x, self._experts(route), weights, ids, backend=backend)

    def check_whole(self, out: torch.Tensor) -> Verdict:
        """Against the op's twin; with FP8 also against the chain of both projections' references.

        The twin quantises the float32 activation, as a kernel does that quantises its own result; elsewhere it is
        rounded to the activations' dtype first, and one in thirty values then falls to the other side of a boundary.
        """
        dtype = self.adapter.problem.dtype
        limits = THROUGH_FP8_LIMITS if self.adapter.scheme.fp8 else None
        if "whole" not in self._references:
            weights, ids = self._routes[0]
            experts = self.adapter.weights[0]
            self._references["whole"] = fused_experts_reference(self.x.float(), experts, weights, ids)
        verdict = compare(out, self._references["whole"], dtype, limits)
        if verdict.ok or not self.adapter.scheme.fp8:
            return verdict
        chained = self._reference("down").unflatten(0, (self.size, -1)).sum(1)
        return _nearest([verdict, compare(out, chained, dtype, limits)])

    def alignment(self, block_m: int, route: int) -> Alignment:
        """Sorted tokens of one routing."""
        key = (block_m, route)
        if key not in self._alignments:
            self._alignments[key] = self._align(self._routes[route][1], block_m)
        return self._alignments[key]

    def hidden(self, alignment: Alignment, config: Mapping[str, Any]) -> Rows:
        """The down projection's input in sorted order: route 0's true values, shared by all routings."""
        key = (alignment.block, self._hands_over_fp8(config))
        if key not in self._hidden:
            rows = alignment.expert_ids.numel() * alignment.block
            hidden = torch.zeros(rows, self.adapter.weights[0].padded, dtype=self.x.dtype, device=self.x.device)
            if self.x.device.type != "meta":
                places, slots = self._valid(self.alignment(alignment.block, 0))
                hidden[places, : self.adapter.problem.N] = self._reference("up")[slots].to(self.x.dtype)
            made = Rows(hidden)
            first = self.alignment(alignment.block, 0) if self.x.device.type != "meta" else alignment
            self._hidden[key] = self._quantised(made, first, config) if key[1] else made
        return self._hidden[key]

    def _align(self, ids: torch.Tensor, block_m: int) -> Alignment:
        if ids.device.type != "meta":
            return moe_align_block_size(ids, block_m, self.adapter.problem.E)
        blocks = ids.numel() + self.adapter.problem.E
        made = [torch.empty(n, dtype=torch.int32, device="meta") for n in (blocks * block_m, blocks, 2)]
        return Alignment(made[0], made[1], made[2], block_m)

    def _experts(self, route: int) -> PreparedExperts:
        return self.adapter.weights[route % len(self.adapter.weights)]

    def _valid(self, alignment: Alignment) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of real rows in route 0's sorted layout, and their flat slots; blocks of absent experts come first."""
        if alignment.block in self._places:
            return self._places[alignment.block]
        used, absent = (int(value) for value in alignment.num_post_padded[:2])
        first = absent * alignment.block
        slots = alignment.sorted_ids[first:used].long()
        places = torch.nonzero(slots < self._routes[0][1].numel()).flatten()
        self._places[alignment.block] = (places + first, slots[places])
        return self._places[alignment.block]

    def _reference(self, projection: Projection) -> torch.Tensor:
        """float32 [M * topk, N] (up) or [M * topk, H] (down) in the order of the flattened routing."""
        if projection not in self._references:
            weights, ids = self._routes[0]
            e, flat = self.adapter.weights[0], ids.flatten()
            up = projection == "up"
            act = None if up else self._reference("up").to(self.x.dtype).float()
            out = torch.zeros(
                flat.numel(), self.adapter.problem.N if up else self.adapter.problem.H, device=self.x.device
            )
            for expert in flat[flat >= 0].unique().tolist():
                slots = torch.nonzero(flat == expert).flatten()
                w1, w2 = expert_weights(e, expert, torch.float32)
                if act is None:
                    rows = self._rounded(self.x[slots // ids.shape[1]].float())
                    y = rows @ deinterleave(w1[None], e.intermediate)[0].T
                    out[slots] = e.activation.apply(y[:, : e.intermediate], y[:, e.intermediate :])
                else:
                    out[slots] = (self._rounded(act[slots]) @ w2.T) * weights.flatten()[slots, None]
            self._references[projection] = out
        return self._references[projection]

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Activations with the rounding of their quantisation, where the scheme has one."""
        if not self.adapter.scheme.fp8:
            return rows
        return _rounded(rows, BLOCK_K if self.adapter.scheme.kind == "fp8_block" else rows.shape[1])


def _nearest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of the reference that comes closest."""
    return min(verdicts, key=lambda verdict: verdict.rms)


def _rounded(rows: torch.Tensor, group: int) -> torch.Tensor:
    values, scales = per_token_group_quant_fp8_reference(rows.float().contiguous(), group, dtype=torch.float8_e4m3fn)
    return (values.float().unflatten(1, (-1, group)) * scales[:, :, None]).flatten(1)


_MAKERS: dict[str, Callable[[Problem], Adapter]] = {
    "fused_experts": MoegateExperts,
    "block_fp8_linear": make_linear,
    "store_kv_cache": make_store,
}
