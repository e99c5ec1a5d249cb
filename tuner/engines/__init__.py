"""Whose kernel is tuned: one adapter per engine, all with one interface (`tuner.engines.base`).

This package is imported by the measuring child, inside an engine's own environment: torch, triton and numpy only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moegate.errors import UsageError

if TYPE_CHECKING:
    from tuner.engines.base import Adapter
    from tuner.problem import Problem

__all__ = ["ENGINES", "ensure_engine", "load_adapter"]

ENGINES: dict[str, str] = {
    "moegate": "tuner.engines.moegate:make",
    "sglang": "tuner.engines.sglang:make",
    "vllm": "tuner.engines.vllm:make",
}
"""Engine -> where its adapter is made. No command takes anything else; for code, `module:function` is an engine too."""


def ensure_engine(engine: str) -> str:
    """Return the name of an engine; UsageError for any other word."""
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}", field="--engine", fix=f"one of {', '.join(ENGINES)}")
    return engine


def load_adapter(engine: str, problem: Problem) -> Adapter:
    """Make the adapter of an engine for a problem. UsageError where there is none, or it does not know the op."""
    place = ENGINES.get(engine, engine)
    module, _, name = place.partition(":")
    if not name:
        ensure_engine(engine)
    adapter: Adapter = getattr(importlib.import_module(module), name)(problem)
    return adapter
