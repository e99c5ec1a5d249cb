"""What compiled facts say about a config before it is measured: rules as data, one reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.strategies.base import ErrorClass

__all__ = ["RULES", "Rule", "rejected"]

_TENSOR_MEMORY_COLUMNS = 512
_THREADS = 1024
# Small spills are measured like anything else, for they have won before; a kernel that lives in memory is not.
_SPILL_BYTES = 2048


@dataclass(frozen=True)
class Rule:
    """One reason not to measure. `broken(facts, limits)` returns the words, or None."""

    error: ErrorClass
    broken: Callable[[Mapping[str, Any], Mapping[str, int]], str | None]


def _shared(facts: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    limit = limits.get("shared", 0)
    if limit and facts["shared"] > limit:
        return f"{facts['shared']} bytes of shared memory, the device has {limit}"
    return None


def _tensor_memory(facts: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    del limits
    return f"{facts['tmem']} columns of tensor memory" if facts["tmem"] > _TENSOR_MEMORY_COLUMNS else None


def _threads(facts: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    limit = limits.get("threads") or _THREADS
    return f"{facts['threads']} threads, a block has at most {limit}" if facts["threads"] > limit else None


def _spills(facts: Mapping[str, Any], limits: Mapping[str, int]) -> str | None:
    spilled = facts.get("spill_bytes")
    if spilled is not None and spilled > limits.get("spills", _SPILL_BYTES):
        return f"{spilled} bytes a thread are spilled"
    return None


RULES: tuple[Rule, ...] = (
    Rule("over-shared", _shared),
    Rule("over-tensor-memory", _tensor_memory),
    Rule("over-threads", _threads),
    Rule("spills", _spills),
)


def rejected(facts: Mapping[str, Any], limits: Mapping[str, int]) -> tuple[ErrorClass, str] | None:
    """The first rule that a compiled kernel breaks, with its words; None for one that may be measured."""
    for rule in RULES:
        words = rule.broken(facts, limits)
        if words is not None:
            return rule.error, words
    return None
