"""An engine for the fault tests: plain torch, and configs that misbehave where they say FAULT."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from tuner.engines.base import AdapterBase, Routes, Verdict, compare
from tuner.problem import Problem


def make(problem: Problem) -> Planted:
    return Planted(problem)


class Planted(AdapterBase):
    engine = "planted"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def kernel_hash(self) -> str:
        return "planted"

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        return 4

    def batch(self, size: int, routes: Routes) -> _Batch:
        return _Batch(size)

    def kernels_of(self, projection: str) -> tuple[str, ...]:
        return (projection,)

    def simulate(self, target: Mapping[str, Any]) -> None:
        pass


class _Batch:
    routes = 1

    def __init__(self, size: int) -> None:
        self.size = size
        self.x = torch.arange(1.0, size + 1)

    def launch(self, projection: str, config: Mapping[str, Any], route: int) -> torch.Tensor:
        fault = config.get("FAULT")
        if fault == "hang":
            time.sleep(3600)
        elif fault == "segfault":
            ctypes.string_at(0)
        elif fault == "abort":
            os.abort()
        elif fault == "exit":
            os._exit(7)
        elif fault == "exception":
            raise RuntimeError("PassManager::run failed")
        elif fault == "memory":
            raise MemoryError("out of memory")
        elif fault == "illegal":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        elif fault == "unwritten":
            return torch.empty(self.size)
        elif fault == "wrong":
            return self.x * 2.5
        elif fault == "chatty":
            print("a library that prints to standard output")
        return self.x * 2

    def check(self, projection: str, config: Mapping[str, Any], out: torch.Tensor) -> Verdict:
        return compare(out, self.x * 2, "float32")

    def whole(self, configs: Mapping[str, Mapping[str, Any]], route: int) -> torch.Tensor:
        for config in configs.values():
            out = self.launch("up", config, route)
        if any(config.get("FAULT") == "moody" for config in configs.values()):
            return out + torch.rand(1) * 1e-6
        return out

    def check_whole(self, out: torch.Tensor) -> Verdict:
        return compare(out, self.x * 2, "float32")
