"""The config that a kernel runs with when no file answers: SGLang's rule (0.5.23) and vLLM's (0.32.0)."""

from __future__ import annotations

from moegate import devices
from moegate.configs.names import ConfigKey
from moegate.configs.values import Value

# Below this much shared memory SGLang uses smaller FP8 tiles.
LOW_SMEM_BYTES = 128 * 1024

# vLLM runs its CUDA kernel for grouped int4 weights up to this many tokens an expert.
_WNA16_CUDA_TOKENS = 6
_WNA16_CUDA_GROUPS = frozenset({32, 64, 128})

_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


def default_config(
    key: ConfigKey, batch_size: int, *, marlin: bool = False, deterministic: bool = False
) -> dict[str, Value]:
    """SGLang's default kernel config for `batch_size` rows.

    Args:
        key: gives E, dtype, block shape and the device (ROCm pipelines two stages; small shared memory).
        batch_size: rows of hidden states (M).
        marlin: whether the Marlin kernel's row applies.
        deterministic: whether the engine's deterministic mode is on.

    Returns:
        Parameters in the order that files use. Absent `num_warps` and `num_stages` mean the compiler's defaults.
    """
    if deterministic:
        return _row(64, 64, 32, 8)
    device = devices.find(key.device_name)
    stages = 2 if device is not None and device.vendor == "amd" else None
    few = batch_size <= key.E
    if key.dtype == "fp8_w8a8" and key.block_shape and all(key.block_shape):
        return _row(64, key.block_shape[0], key.block_shape[1], 32, 4, stages or 3)
    if key.dtype == "fp8_w8a8":
        small = (
            device is not None and device.vendor == "nvidia" and (device.smem_bytes or LOW_SMEM_BYTES) < LOW_SMEM_BYTES
        )
        if small:
            return _row(32, 64, 256, 1, 4, 4) if few else _row(64, 128, 256, 64, 4, 2)
        return _row(64, 128, 128, 1, 4, stages or 4) if few else _row(128, 256, 128, 32, 8, stages or 4)
    if few or (marlin and batch_size <= 32):
        return _row(16, 32, 64, 1)
    return _row(64, 64, 32, 8)


def vllm_default_config(key: ConfigKey, batch_size: int, topk: int = 1) -> dict[str, Value]:
    """vLLM's default kernel config for `batch_size` rows and `topk` experts per token.

    For weight-only int4 and int8 the kernel adds BLOCK_SIZE_N and BLOCK_SIZE_K itself.
    """
    device = devices.find(key.device_name)
    rocm = device is not None and device.vendor == "amd"
    block = key.block_shape if key.block_shape and all(key.block_shape) else None
    if key.dtype == "fp8_w8a8" and block is not None:
        return _vllm_block_fp8(block, batch_size, rocm)
    if key.dtype in ("int4_w4a16", "int8_w8a16") and key.block_shape is not None:
        return _vllm_wna16(key, batch_size, topk)
    stages = 2 if rocm else 4 if batch_size <= 32 else 3
    return {
        "BLOCK_SIZE_M": next((size for limit, size in ((32, 16), (96, 32), (512, 64)) if batch_size <= limit), 128),
        "BLOCK_SIZE_N": 64 if batch_size <= 64 else 128,
        "BLOCK_SIZE_K": 128 if key.dtype == "fp8_w8a8" or batch_size <= 64 else 64,
        "GROUP_SIZE_M": 16 if batch_size // max(key.E, 1) > 128 else 1,
        "SPLIT_K": 1,
        "num_warps": 4 if batch_size <= 128 else 8,
        "num_stages": stages,
    }


def _vllm_block_fp8(block: tuple[int, int], batch_size: int, rocm: bool) -> dict[str, Value]:
    n, stages = block[0], 2 if rocm else 3
    if not rocm and batch_size <= 8 and block[0] % 64 == 0:
        n, stages = 64, 4 if batch_size <= 4 else 3
    return {
        "BLOCK_SIZE_M": 16 if batch_size <= 64 else 64,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": block[1],
        "GROUP_SIZE_M": 1 if batch_size <= 16 else 32,
        "SPLIT_K": 1,
        "num_warps": 4,
        "num_stages": stages,
    }


def _vllm_wna16(key: ConfigKey, batch_size: int, topk: int) -> dict[str, Value]:
    device, group = devices.find(key.device_name), (key.block_shape or (0, 0))[1]
    cuda = device is None or device.vendor == "nvidia"
    few = batch_size * topk / key.E <= _WNA16_CUDA_TOKENS
    if cuda and key.dtype == "int4_w4a16" and group in _WNA16_CUDA_GROUPS and few:
        rows = min(16, 1 << max(batch_size - 1, 0).bit_length())
    else:
        rows = 16 if batch_size <= 20 else 32 if batch_size <= 40 else 64
    return {"BLOCK_SIZE_M": rows, "GROUP_SIZE_M": 1, "SPLIT_K": 1}


def _row(*values: int) -> dict[str, Value]:
    return dict(zip(_NAMES, values, strict=False))
