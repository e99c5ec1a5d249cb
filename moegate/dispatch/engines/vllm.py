"""vLLM 0.32.0: what `--moe-backend` comes to, and the functions whose branches decide dispatch."""

from __future__ import annotations

from moegate.configs.names import ConfigKey
from moegate.dispatch.engines.rule import BackendRule, Resolved, always, both, first_rule, on, quantised
from moegate.dispatch.engines.watch import Watched
from moegate.dispatch.model import Step
from moegate.families import Layout

REQUESTS: tuple[str, ...] = (
    "auto", "triton", "batched_triton", "deep_gemm", "deep_gemm_mega_moe", "cutlass", "flashinfer_trtllm",
    "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_moe_ep_cutedsl", "flashinfer_b12x", "b12x",
    "flashinfer_moe_ep_mega_deep_gemm", "marlin", "humming", "triton_unfused", "aiter", "aiter_mega_moe",
    "aiter_triton_mxfp4_bf16", "flydsl", "hpc", "emulation", "rdna3",
)  # fmt: skip
"""What `--moe-backend` takes."""

_WNA16 = ("int4_w4a16", "int8_w8a16")

# First match wins; packages are taken as installed, as in vLLM's images.
MOE_AUTO: tuple[BackendRule, ...] = (
    BackendRule("xpu", on("xpu"), "on XPU vLLM's own XPU experts come first"),
    BackendRule("cpu", on("cpu"), "on the CPU only the CPU experts serve"),
    BackendRule("npu", on("npu"), "vLLM has no NPU experts of its own"),
    BackendRule("aiter", on("rocm"), "on ROCm AITER comes first"),
    BackendRule(
        "fp4", quantised("mxfp4_w4a16", "nvfp4_w4a16"), "FP4 weights are served by FlashInfer, Marlin or triton_kernels"
    ),
    BackendRule("marlin", quantised(*_WNA16), "weight-only integers are served by Marlin"),
    BackendRule(
        "triton",
        both(on("cuda-sm90"), quantised("fp8_w8a8"), lambda m, k, p: k.block_shape is not None),
        "on Hopper block FP8 under tensor parallelism prefers triton",
    ),
    BackendRule(
        "cutlass",
        both(on("cuda-sm90", "cuda-sm89"), quantised("fp8_w8a8"), lambda m, k, p: k.per_channel_quant),
        "per-channel FP8 is served by CUTLASS",
    ),
    BackendRule("flashinfer_trtllm", on("cuda-sm100"), "on SM100 FlashInfer's TRT-LLM experts come first"),
    BackendRule("triton", always, "auto resolves to triton"),
)


def moe_backend(layout: Layout, key: ConfigKey, platform: str, request: str) -> Resolved:
    """What `--moe-backend request` comes to for this model on this platform."""
    if request == "auto":
        return first_rule(MOE_AUTO, layout, key, platform)
    if request == "triton" and platform in ("cpu", "npu"):
        return Resolved(platform, f"vLLM has no Triton experts on {platform}")
    why = f"{request} was asked for by name"
    return Resolved(request, why, (Step(request, True, why),))


_ORACLE = "layers/fused_moe/oracle"
_REQUEST = ("runner_backend", "requested_backend", "moe_backend")
_LIST = ("_AVAILABLE_BACKENDS", "AVAILABLE_BACKENDS", "requested_backend")
_MOVES = ("_move_to_front", "_move_to_back", "_return_or_raise")

WATCHED: tuple[Watched, ...] = (
    Watched(f"{_ORACLE}/unquantized.py", "_get_priority_backends", _LIST, _MOVES),
    Watched(f"{_ORACLE}/unquantized.py", "select_unquantized_moe_backend", _LIST, _MOVES, _REQUEST),
    Watched(f"{_ORACLE}/fp8.py", "_get_priority_backends", _LIST, _MOVES),
    Watched(f"{_ORACLE}/fp8.py", "select_fp8_moe_backend", _LIST, _MOVES, _REQUEST),
    Watched(f"{_ORACLE}/mxfp4.py", "_get_priority_backends", _LIST, _MOVES),
    Watched(f"{_ORACLE}/mxfp4.py", "select_mxfp4_moe_backend", _LIST, _MOVES, _REQUEST),
    Watched(f"{_ORACLE}/int_wna16.py", "_get_priority_backends", _LIST, _MOVES),
    Watched(f"{_ORACLE}/int_wna16.py", "select_wna16_moe_backend", _LIST, _MOVES, _REQUEST),
)
