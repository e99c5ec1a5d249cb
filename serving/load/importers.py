"""Results of other load clients, read into bench_serving's names with a statement of what their TPOT means.

Formats are told apart by their fields: `sglang.bench_serving` appends JSON lines, `vllm bench serve --save-result`
writes one object. Both define TPOT as (latency - ttft) / (output tokens - 1), as we do; vLLM calls latency e2el.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.errors import UsageError

__all__ = ["FORMATS", "Format", "Imported", "import_result"]


@dataclass(frozen=True)
class Format:
    """One client's result. `marks` are fields that only it has; `names` maps its names to ours."""

    client: str
    marks: tuple[str, ...]
    names: Mapping[str, str]
    tpot: str


@dataclass(frozen=True)
class Imported:
    """A foreign result: who measured, how many requests completed, its numbers under our names, its TPOT's meaning."""

    client: str
    completed: int
    numbers: dict[str, float]
    tpot: str


_STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
_SHARED = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "itl") for statistic in _STATISTICS),
)
_SAME = {name: name for name in _SHARED}
_TPOT = "(latency - ttft) / (output tokens - 1), per request"

FORMATS: tuple[Format, ...] = (
    Format(
        "sglang.bench_serving",
        ("sharegpt_output_len", "total_output_tokens_retokenized"),
        {
            **_SAME,
            "input_throughput": "input_throughput",
            "total_throughput": "total_throughput",
            "concurrency": "concurrency",
            **{f"{statistic}_e2e_latency_ms": f"{statistic}_e2e_latency_ms" for statistic in _STATISTICS},
        },
        _TPOT,
    ),
    Format(
        "vllm bench serve",
        ("endpoint_type", "total_token_throughput"),
        {
            **_SAME,
            "total_token_throughput": "total_throughput",
            **{f"{statistic}_e2el_ms": f"{statistic}_e2e_latency_ms" for statistic in _STATISTICS},
        },
        _TPOT,
    ),
)


def import_result(path: Path) -> Imported:
    """Read one result; of a file of JSON lines, the last.

    Raises:
        UsageError: the file is no result of a client that is known, or holds no completed request.
    """
    result = _last_object(path)
    found = next((item for item in FORMATS if all(mark in result for mark in item.marks)), None)
    if found is None:
        known = " or ".join(item.client for item in FORMATS)
        raise UsageError("is no result of a client that is known", file=path, fix=f"a result of {known}")
    numbers = {
        ours: float(result[theirs])
        for theirs, ours in found.names.items()
        if isinstance(result.get(theirs), int | float) and math.isfinite(result[theirs])
    }
    completed = int(numbers.get("completed", 0))
    if completed < 1:
        raise UsageError("no request completed", file=path, field="completed")
    return Imported(found.client, completed, numbers, found.tpot)


def _last_object(path: Path) -> dict[str, Any]:
    try:
        lines = [line for line in canonical.read_file(path).decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise UsageError(str(error), file=path) from None
    if not lines:
        raise UsageError("is empty", file=path)
    many = len(lines) > 1 and lines[-1].lstrip().startswith("{") and lines[-1].rstrip().endswith("}")
    value = canonical.loads_json(lines[-1] if many else "\n".join(lines), file=path)
    if not isinstance(value, dict):
        raise UsageError("holds no object", file=path)
    return value
