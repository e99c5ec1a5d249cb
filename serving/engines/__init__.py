"""The engines that can be served: one file each, one protocol (`protocol.Engine`), one table."""

from __future__ import annotations

from collections.abc import Mapping

from moegate.errors import UsageError
from serving.engines.moegate import MoegateEngine
from serving.engines.protocol import Command, Engine, Launched, Spec
from serving.engines.sglang import SglangEngine
from serving.engines.vllm import VllmEngine

__all__ = ["ENGINES", "Command", "Engine", "Launched", "Spec", "get"]

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (MoegateEngine(), SglangEngine(), VllmEngine())}


def get(name: str) -> Engine:
    """The engine of this name; UsageError where there is none."""
    engine = ENGINES.get(name)
    if engine is None:
        raise UsageError(f"unknown engine {name!r}", field="engine", fix=f"one of {', '.join(ENGINES)}")
    return engine
