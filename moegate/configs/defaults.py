"""The config that a kernel runs with when no file answers: SGLang's rule, as facts (0.5.23)."""

from __future__ import annotations

from moegate import devices
from moegate.configs.names import ConfigKey
from moegate.configs.values import Value

# Below this much shared memory SGLang uses smaller FP8 tiles.
LOW_SMEM_BYTES = 128 * 1024

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


def _row(*values: int) -> dict[str, Value]:
    return dict(zip(_NAMES, values, strict=False))
