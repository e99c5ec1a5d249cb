"""vLLM's fused-MoE kernel (read and compiled with 0.32.0), from its own environment or from its wheel's kernel file."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moegate.errors import UsageError
from tuner.engines.foreign import ForeignExperts, Source, capability
from tuner.engines.quantised import Operand
from tuner.problem import Problem
from xkernels.ops.align import Alignment

__all__ = ["VllmExperts", "make"]

SOURCE = Source(
    "vllm",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "VLLM_KERNEL",
    "fused_moe_kernel",
    {
        "triton": triton,
        "tl": tl,
        "resolve_moe_use_td": lambda: False,
        "enable_swap_ab": lambda m, n: capability(90) and not capability(91) and m < 64 <= n,
    },
)


def make(problem: Problem) -> VllmExperts:
    """The adapter for `problem`; UsageError where the kernel is not to be had, or the problem is not adapted."""
    return VllmExperts(SOURCE, problem)


class VllmExperts(ForeignExperts):
    """Both projections by `invoke_fused_moe_triton_kernel`; vLLM's files have no USE_TMA."""

    def invoke(self, a: Operand, b: Operand, out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
               alignment: Alignment, config: dict[str, Any], *, up: bool, tma: bool, sorted_out: bool,
               topk: int) -> None:  # fmt: skip
        """vLLM's launcher. UsageError for descriptors, which its configs cannot ask for."""
        del ids
        if tma or sorted_out:
            raise UsageError("vLLM's configs cannot ask for descriptor loads", field="USE_TMA")
        self.kernel.module.invoke_fused_moe_triton_kernel(
            a.values, b.values, out, a.scale, b.scale, weights, alignment.sorted_ids, alignment.expert_ids,
            alignment.num_post_padded, not up, topk, config, self.compute, self.fp8, False, False, False, False,
            list(self.block) if self.block else None,
        )  # fmt: skip
