"""The checks behind `tuner verify`: one function per op, each returns a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moegate.records import Case
from tuner.child.timing import poisoned
from tuner.commands.verify import describe
from tuner.engines.base import compare
from xkernels.device import live
from xkernels.ops.fused_experts import fused_experts, fused_experts_reference, prepare_experts

__all__ = ["CHECKS"]


# The torch row rounds between its matmuls, so that its errors add up.
_TORCH_LIMITS = {"bfloat16": (3e-2, 1e-2), "float16": (5e-3, 2e-3)}


def _fused_experts(dtype: str, backend: str, shape: Any) -> Case:
    name = describe("fused_experts", dtype, backend, shape)
    if dtype.startswith("fp8"):
        return Case(name, "skipped", "quantised weights have shapes of their own: run a tune or a bench in fp8_w8a8")
    kind: torch.dtype = getattr(torch, dtype)
    device = live().torch_device()
    g = torch.Generator().manual_seed(shape.tokens * 1009 + shape.E)
    w1 = (torch.randn(shape.E, 2 * shape.N, shape.H, generator=g) / 8).to(device, kind)
    w2 = (torch.randn(shape.E, shape.H, shape.N, generator=g) / 8).to(device, kind)
    x = (torch.randn(shape.tokens, shape.H, generator=g) / 2).to(device, kind)
    weights, ids = torch.topk(torch.softmax(torch.randn(shape.tokens, shape.E, generator=g), -1), shape.topk, -1)
    ids = ids.int()
    if shape.absent:
        ids[::2, 0] = -1
    weights, ids = weights.to(device).contiguous(), ids.to(device)
    experts = prepare_experts(w1, w2)
    wide = prepare_experts(w1.float(), w2.float())
    block_m, block_n, block_k = shape.tile
    config = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": 1,
              "num_warps": 4, "num_stages": 2}  # fmt: skip
    try:
        with poisoned():
            got = fused_experts(x, experts, weights, ids, backend=backend, up=config, down=config)
            again = fused_experts(x, experts, weights, ids, backend=backend, up=config, down=config)
    except Exception as error:  # a kernel that does not run is a failed case, whatever it raises
        return Case(name, "failed", f"{type(error).__name__}: {error}"[:500])
    limits = _TORCH_LIMITS.get(dtype) if backend == "torch" else None
    verdict = compare(got, fused_experts_reference(x.float(), wide, weights, ids), dtype, limits)
    detail = {"max_rel": verdict.max_rel, "rms": verdict.rms} if verdict.unwritten == 0 else {}
    if not verdict.ok:
        return Case(name, "failed", verdict.reason, detail)
    if not torch.equal(got, again):
        return Case(name, "failed", "two runs differ", detail)
    return Case(name, "passed", "", detail)


CHECKS: dict[str, Callable[[str, str, Any], Case]] = {"fused_experts": _fused_experts}
"""Op -> its check (dtype, backend, shape) -> case."""
