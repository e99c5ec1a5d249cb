"""What makes a pair void: conditions that differed between its two launches, by a table of checks.

A launch's `detail` may hold the readings named in `CHECKS`; a reading that either launch lacks is not judged. A void
pair is run again: it is neither evidence for nor against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Readings = Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """One covariate. name: key of the reading. broken: whether two readings spoil the pair. says: text for a person."""

    name: str
    broken: Callable[[Any, Any], bool]
    says: str


def _relative(limit: float) -> Callable[[Any, Any], bool]:
    return lambda a, b: abs(float(a) - float(b)) > limit * max(abs(float(a)), abs(float(b)))


def _step(limit: float) -> Callable[[Any, Any], bool]:
    return lambda a, b: abs(float(a) - float(b)) > limit


def _either(a: Any, b: Any) -> bool:
    return bool(a) or bool(b)


def _differ(a: Any, b: Any) -> bool:
    return bool(a != b)


CHECKS: tuple[Check, ...] = (
    Check("clock_mhz", _relative(0.02), "clocks differ by more than 2 %"),
    Check("memory_clock_mhz", _relative(0.02), "memory clocks differ by more than 2 %"),
    Check("power_limit_w", _differ, "power limits differ"),
    Check("temperature_c", _step(15.0), "temperatures differ by more than 15 degrees"),
    Check("throttle_reasons", _either, "the device was throttled"),
    Check("foreign_processes", _either, "another process used the device"),
    Check("driver", _differ, "driver versions differ"),
    Check("sequence_sha256", _differ, "the arms were sent different requests"),
    Check("completed", _differ, "the arms completed different numbers of requests"),
    Check("input_sha256", _differ, "the arms had different inputs"),
)
"""Every covariate with its limit; the one reader is `void_reason`."""


def void_reason(baseline: Readings, candidate: Readings) -> str | None:
    """Why two launches must not form a pair, or None. Readings as in a launch's `detail`."""
    for check in CHECKS:
        a, b = baseline.get(check.name), candidate.get(check.name)
        if a is None or b is None:
            continue
        try:
            broken = check.broken(a, b)
        except (TypeError, ValueError, OverflowError):
            return f"{check.name} is not readable"
        if broken:
            return check.says
    return None
