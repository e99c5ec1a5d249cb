"""An engine for `tune_h200.py planted`: moegate's kernels, with configs that misbehave where they say FAULT."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tuner.engines.moegate import MoegateExperts
from tuner.problem import Problem


@triton.jit
def _stray(p, far):
    tl.store(p + far, 1.0)


def make(problem: Problem) -> Planted:
    """The adapter."""
    return Planted(problem)


class Planted(MoegateExperts):
    """Misbehaves on request, on a live device only."""

    def batch(self, size: int, routes: Any) -> Any:
        """The real batch behind a wrapper."""
        return _Batch(super().batch(size, routes))


class _Batch:
    def __init__(self, real: Any) -> None:
        self._real, self.size, self.routes = real, real.size, real.routes

    def launch(self, projection: Any, config: Mapping[str, Any], route: int) -> Any:
        out = self._real.launch(projection, {k: v for k, v in config.items() if k != "FAULT"}, route)
        fault = config.get("FAULT")
        if fault is None or self._real.x.device.type == "meta":
            return out
        if fault == "hang":
            time.sleep(3600)
        elif fault == "segfault":
            ctypes.string_at(0)
        elif fault == "illegal":
            _stray[(1,)](torch.empty(1, device="cuda"), 1 << 40)
            torch.cuda.synchronize()
        elif fault == "wrong":
            (out.values if out.scale is None else out.scale).mul_(1.5)
        return out

    def check(self, projection: Any, config: Mapping[str, Any], out: Any) -> Any:
        return self._real.check(projection, config, out)
