"""The config that runs when no file answers, with the launch parameters that it leaves to the compiler spelled out."""

from __future__ import annotations

from moegate.configs import default_config
from tuner.config import Config, Scalar
from tuner.problem import Problem

__all__ = ["default_for"]

# What Triton takes where a config has no num_warps and num_stages, by vendor.
_COMPILER: dict[str, dict[str, Scalar]] = {
    "nvidia": {"num_warps": 4, "num_stages": 3},
    "amd": {"num_warps": 4, "num_stages": 2},
    "intel": {"num_warps": 4, "num_stages": 2},
    "cpu": {"num_warps": 4, "num_stages": 2},
}

VENDORS = tuple(_COMPILER)


def default_for(problem: Problem, vendor: str, device_name: str, batch_size: int) -> Config:
    """The default config of one batch size."""
    values = default_config(problem.key(device_name), batch_size)
    return Config.of({**_COMPILER[vendor], **values})
