"""How many blocks a kernel may start that waits for all of its blocks.

Such a kernel hangs for ever when one block cannot start before another ends. One block per unit always fits, whatever
registers and shared memory the kernel takes in a dtype; more would have to be proved for each compiled variant.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from xkernels.device import Device

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class GridUse:
    """The grid that a synchronising kernel was started with: `blocks` = min(`wanted`, `resident`)."""

    kernel: str
    dtype: str
    wanted: int
    resident: int
    blocks: int


# What was started in this process, newest per (kernel, dtype): shown in server info and report.
GRIDS: dict[tuple[str, str], GridUse] = {}


def synchronising_grid(wanted: int, kernel: str, dtype: torch.dtype, device: Device) -> int:
    """Blocks to start: at most as many as are resident on `device` together, at least one.

    Every launch of a kernel with a grid barrier takes its grid from here, for every dtype. The first grid of a kernel
    and dtype, and each change of its resident limit, is logged once.
    """
    resident = max(1, device.limits().units)
    use = GridUse(kernel, str(dtype).removeprefix("torch."), wanted, resident, max(1, min(wanted, resident)))
    seen = GRIDS.get((use.kernel, use.dtype))
    GRIDS[use.kernel, use.dtype] = use
    if seen is None or seen.resident != resident:
        _LOG.info("%s %s: grid %d of %d wanted, %d resident", kernel, use.dtype, use.blocks, wanted, resident)
    return use.blocks
