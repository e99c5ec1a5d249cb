"""SGLang's fused-MoE kernel (read and run with 0.5.23), from its environment or from its wheel's kernel file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moegate.errors import UsageError
from tuner.engines.foreign import ForeignExperts, Source, capability
from tuner.engines.quantised import Operand
from tuner.problem import Problem
from xkernels.ops.align import Alignment

__all__ = ["SglangExperts", "make"]

SOURCE = Source(
    "sglang",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels",
    "SGLANG_KERNEL",
    "fused_moe_kernel",
    {
        "is_cuda": lambda: True,
        "get_moe_padding_size": lambda *_: 0,
        # As its runtime answers on Hopper: operands swapped for few FP8 rows. Dependent launches stay off: they compile
        # a config twice, for up to 512 rows and for more.
        "is_sm90_supported": lambda *_: capability(90) and not capability(100),
    },
)


def make(problem: Problem) -> SglangExperts:
    """The adapter for `problem`; UsageError where the kernel is not to be had, or the problem is not adapted."""
    if problem.dtype.startswith("fp8") and problem.block_shape is None:
        raise UsageError("SGLang quantises per tensor inside its launcher", field="--dtype", fix="a model with blocks")
    return SglangExperts(SOURCE, problem)


class SglangExperts(ForeignExperts):
    """Both projections by `invoke_fused_moe_kernel`; with descriptors the down projection reads sorted rows."""

    def invoke(self, a: Operand, b: Operand, out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
               alignment: Alignment, config: dict[str, Any], *, up: bool, tma: bool, sorted_out: bool,
               topk: int) -> None:  # fmt: skip
        """SGLang's launcher, with the flags that its runtime sets for this step."""
        flags: Mapping[str, bool] = {"b_use_tma": tma, "a_use_tma": tma and not up, "c_sorted": sorted_out}
        self.kernel.module.invoke_fused_moe_kernel(
            a.values, b.values, None, out, a.scale, b.scale, None, weights, ids, alignment.sorted_ids,
            alignment.expert_ids, alignment.num_post_padded, not up, topk, config, self.compute,
            self.fp8, False, False, False, False, list(self.block) if self.block else None, **flags,
        )  # fmt: skip
