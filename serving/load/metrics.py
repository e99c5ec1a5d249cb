"""From events to metrics, under the field names of bench_serving.

Per request: ttft = first content - send; e2e_latency = last content - send; tpot = (latency - ttft) / (output tokens -
1) for more than one token. itl = gaps between pieces with content, pooled over requests (a piece of several tokens is
one gap). Output tokens are the server's own count. Throughputs are over the measured window.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moegate.records import Samples
from serving.load.client import Event
from serving.load.drive import Run

__all__ = ["METRICS", "Metric", "lines", "percentile", "pooled", "samples", "series", "summary"]


@dataclass(frozen=True)
class Metric:
    """One metric of a launch: unit, and which way is better."""

    name: str
    unit: str
    better: Literal["lower", "higher"]


_TIMES = ("ttft", "tpot", "itl", "e2e_latency")
_STATISTICS = ("median", "mean", "std", "p90", "p95", "p99")

METRICS: tuple[Metric, ...] = (
    Metric("output_throughput", "tok/s", "higher"),
    Metric("request_throughput", "req/s", "higher"),
    Metric("input_throughput", "tok/s", "higher"),
    Metric("total_throughput", "tok/s", "higher"),
    *(Metric(f"{statistic}_{name}_ms", "ms", "lower") for name in _TIMES for statistic in _STATISTICS),
)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks (numpy's default); NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(run: Run) -> dict[str, float]:
    """Every number of a run under its bench_serving name. Failed requests count in none but `failed`."""
    good = [event for event in run.events if event.ok]
    duration = max(run.duration, 1e-9)
    read, made = sum(event.input_tokens for event in good), sum(event.tokens for event in good)
    out: dict[str, float] = {
        "duration": run.duration,
        "attempted": len(run.events),
        "completed": len(good),
        "failed": len(run.events) - len(good),
        "short": sum(event.short for event in good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(good) / duration,
        "input_throughput": read / duration,
        "output_throughput": made / duration,
        "total_throughput": (read + made) / duration,
        "concurrency": sum(event.latency for event in good) / duration,
    }
    for name, values in _series(good).items():
        out.update({f"{statistic}_{name}_ms": value * 1e3 for statistic, value in _spread(values).items()})
    return out


def _series(good: Sequence[Event]) -> dict[str, list[float]]:
    tpots = (event.tpot for event in good)
    return {
        "ttft": [event.ttft for event in good],
        "tpot": [value for value in tpots if value is not None],
        "itl": [b - a for event in good for a, b in zip(event.arrivals, event.arrivals[1:], strict=False)],
        "e2e_latency": [event.latency for event in good],
    }


def series(run: Run, most: int = 200) -> dict[str, list[float]]:
    """The distributions behind the statistics, in ms: at most `most` values each, at even ranks."""
    good = [event for event in run.events if event.ok]
    found = {f"{name}_ms": [round(value * 1e3, 4) for value in values] for name, values in _series(good).items()}
    return pooled([found], most)


def pooled(rounds: Sequence[Mapping[str, Sequence[float]]], most: int = 200) -> dict[str, list[float]]:
    """One `series` of several: all their values together, again at most `most` at even ranks."""
    names = dict.fromkeys(name for one in rounds for name, values in one.items() if values)
    found = {name: sorted(value for one in rounds for value in one.get(name, ())) for name in names}
    return {
        name: [values[i * len(values) // min(most, len(values))] for i in range(min(most, len(values)))]
        for name, values in found.items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "median": percentile(values, 50),
        **{f"p{percent}": percentile(values, percent) for percent in (90, 95, 99)},
        "max": max(values),
    }


def samples(numbers: dict[str, float], primary: str) -> tuple[Samples, ...]:
    """One value per metric and launch, because a launch is the unit of replication."""
    return tuple(
        Samples(metric.name, metric.unit, metric.better, (numbers[metric.name],), metric.name == primary)
        for metric in METRICS
        if metric.name in numbers
    )


def lines(numbers: Mapping[str, object]) -> list[str]:
    """The finite numbers as a person reads them: name, value, and the unit where the name does not end in it."""
    units = {"duration": "s", **{m.name: m.unit for m in METRICS if not m.name.endswith(f"_{m.unit}")}}
    return [
        f"{name:28} {value:.4g} {units.get(name, '')}".rstrip()
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]
