"""Facts for dispatch that only a live device can tell, each found out once per process and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from xkernels.device import Device
from xkernels.ops.linear import scaled_mm_refusal

__all__ = ["asking"]

# Each remembers what a device answered.
_PROBES: Mapping[str, Callable[[torch.device], bool]] = {
    "scaled_mm_block": lambda device: scaled_mm_refusal(device) is None,
}


def asking(live: Device) -> Callable[[str], bool | None]:
    """What `moegate.dispatch.Capabilities.ask` is for `live`; the answer is None for a fact that nothing finds out."""

    def ask(name: str) -> bool | None:
        probe = _PROBES.get(name)
        return None if probe is None else probe(live.torch_device())

    return ask
