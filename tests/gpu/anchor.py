"""SGLang's fused-MoE kernels for side-by-side measurements, loaded from one file of its wheel with imports stubbed.

Get it with `pip download --no-deps sglang==0.5.23` and unzip `sglang/kernels/ops/moe/fused_moe_triton_kernels.py` into
an ignored folder; give its path in SGLANG_KERNEL. It is measured against, never committed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

DEFAULT = ".anchor/sglang/kernels/ops/moe/fused_moe_triton_kernels.py"


class _Off:
    def __getattr__(self, _: str) -> Any:
        return types.SimpleNamespace(get=lambda: False)


def _module(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes, __path__=[])
    sys.modules[name] = module


def load(quant: Any = None) -> Any:
    """The kernel module; `quant(x, group)` is the FP8 group quantisation it calls (SGLang's own is a CUDA library)."""
    for name in ("sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.kernels.ops", "sglang.srt",
                 "sglang.kernels.ops.quantization", "sglang.srt.layers", "sglang.srt.layers.moe"):  # fmt: skip
        _module(name)
    fp8 = dict.fromkeys(("per_token_group_quant_fp8", "scaled_fp8_quant", "sglang_per_token_group_quant_fp8"), quant)
    int8 = dict.fromkeys(("per_token_group_quant_int8", "per_token_quant_int8", "sglang_per_token_group_quant_int8"))
    _module("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False)
    _module("sglang.kernels.ops.quantization.fp8_kernel", **fp8)
    _module("sglang.kernels.ops.quantization.int8_kernel", **int8)
    _module("sglang.srt.batch_invariant_ops", is_batch_invariant_mode_enabled=lambda: False)
    _module("sglang.srt.environ", envs=_Off())
    _module("sglang.srt.layers.moe.utils", get_moe_padding_size=lambda *_: 0)
    no = dict.fromkeys(("cpu_has_amx_support", "is_cpu", "is_hip"), lambda: False)
    _module("sglang.srt.utils", is_cuda=lambda: True, is_sm90_supported=lambda *_: True, **no)
    path = Path(os.environ.get("SGLANG_KERNEL", DEFAULT))
    spec = importlib.util.spec_from_file_location("anchor_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["anchor_kernels"] = module
    spec.loader.exec_module(module)
    return module


class Anchor:
    """SGLang's chain of kernels for one set of weights: up, activation, down, combine."""

    def __init__(self, kernels: Any, w: dict[str, torch.Tensor | None], topk: int, block: bool) -> None:
        self.k, self.w, self.topk, self.block = kernels, w, topk, block

    def _gemm(
        self, x: Any, name: str, out: Any, weights: Any, ids: Any, al: Any, mul: bool, topk: int, cfg: Any
    ) -> Any:
        config = {k: v for k, v in cfg.items() if k in _FIELDS}
        self.k.invoke_fused_moe_kernel(
            x, self.w[name], None, out, None, self.w[name + "_scale"], None, weights, ids, *al, mul, topk, config,
            tl.bfloat16, self.block, False, False, False, False, [128, 128] if self.block else None,
            b_use_tma=bool(cfg.get("USE_TMA")),
        )  # fmt: skip
        return out

    def up(self, x: Any, weights: Any, ids: Any, al: Any, cfg: Any) -> Any:
        out = torch.empty(x.shape[0], self.topk, self.w["w1"].shape[1], dtype=x.dtype, device=x.device)
        return self._gemm(x, "w1", out, weights, ids, al, False, self.topk, cfg)

    def act(self, up: Any, cfg: Any) -> Any:
        flat = up.view(-1, up.shape[-1])
        out = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=up.dtype, device=up.device)
        self.k.act_and_mul_triton(flat, out, cfg)
        return out

    def down(self, act: Any, weights: Any, ids: Any, al: Any, cfg: Any) -> Any:
        out = torch.empty(*ids.shape, self.w["w2"].shape[1], dtype=act.dtype, device=act.device)
        return self._gemm(act, "w2", out, weights, ids, al, True, 1, cfg)

    def sum(self, down: Any) -> Any:
        out = torch.empty(down.shape[0], down.shape[2], dtype=down.dtype, device=down.device)
        self.k.moe_sum_reduce_triton(down, out, 1.0)
        return out

    def chain(self, x: Any, weights: Any, ids: Any, al: Any, up: Any, down: Any) -> Any:
        return self.sum(self.down(self.act(self.up(x, weights, ids, al, up), up), weights, ids, al, down))


_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
