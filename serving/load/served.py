"""What the server itself measured of a load: its histograms' sums and counts, before and after.

A server's speed changes with whatever else its machine does. Its own mean over the very same requests takes that out
of a client's: what is left is the client and the wire. The table names what is read from `/metrics`, a histogram per
metric of ours. vLLM's time per output token is, per request, the last token's stamp less the first's in the engine's
core over the tokens after the first (`vllm/v1/metrics/stats.py` of 0.32.0): our TPOT, without the way.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

__all__ = ["HISTOGRAMS", "Total", "means", "read", "settled", "totals"]

HISTOGRAMS: Mapping[str, str] = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e_latency": "vllm:e2e_request_latency_seconds",
}
_PER_REQUEST = "tpot"  # its count is that of finished requests
_LINE = re.compile(r"^([^\s{]+?)_(sum|count)(?:\{.*\})? (\S+)", re.MULTILINE)
_MOST_BYTES = 8 << 20
_PATIENCE_S = 2.0
_POLL_S = 0.02
_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True)
class Total:
    """One histogram as it stands: seconds summed up, and over how many."""

    sum: float = 0.0
    count: int = 0


def totals(text: str) -> dict[str, Total]:
    """The histograms of the table in a page of metrics, under our names, engines added up; those it has."""
    ours = {theirs: name for name, theirs in HISTOGRAMS.items()}
    found: dict[str, Total] = {}
    for theirs, part, value in _LINE.findall(text):
        if name := ours.get(theirs):
            one, number = found.get(name, Total()), _number(value)
            found[name] = Total(one.sum + number, one.count) if part == "sum" else Total(
                one.sum, one.count + int(number))  # fmt: skip
    return found


def means(before: Mapping[str, Total], after: Mapping[str, Total], requests: int) -> dict[str, float] | None:
    """What the server measured between two readings, in ms; None where it is not of exactly these requests.

    `requests` counts those that ended well. Another client's, or one that was given up, would be in the means too. A
    histogram that shrank began anew in between (the server was started again), and tells nothing of either part.
    """
    grown = {name: Total(total.sum - before.get(name, Total()).sum, total.count - before.get(name, Total()).count)
             for name, total in after.items()}  # fmt: skip
    if grown.get(_PER_REQUEST, Total()).count != requests or not requests:
        return None
    if any(total.sum < 0 or total.count < 0 for total in grown.values()):
        return None
    found = {name: total.sum / total.count * 1e3 for name, total in grown.items() if total.count > 0}
    return {"requests": requests} | {f"mean_{name}_ms": mean for name, mean in found.items() if math.isfinite(mean)}


async def read(session: aiohttp.ClientSession, base_url: str) -> dict[str, Total]:
    """Read the server's histograms; none where it has none to show, or more than is read."""
    try:
        async with session.get(base_url.rstrip("/") + "/metrics", timeout=_TIMEOUT) as response:
            if response.status != 200:
                return {}
            page = await response.content.read(_MOST_BYTES)
            while chunk := await response.content.read(_MOST_BYTES - len(page)):
                page += chunk
            return {} if len(page) == _MOST_BYTES else totals(page.decode(errors="replace"))  # cut, maybe in a number
    except (aiohttp.ClientError, TimeoutError):
        return {}


async def settled(
    session: aiohttp.ClientSession, base_url: str, before: Mapping[str, Total], requests: int
) -> dict[str, Total]:
    """Read again once `requests` more are counted: a server counts an answer some time after it has sent it."""
    deadline = time.perf_counter() + _PATIENCE_S
    wanted = before.get(_PER_REQUEST, Total()).count + requests
    while True:
        now = await read(session, base_url)
        counted = now.get(_PER_REQUEST)  # a server that has no such histogram is not waited for
        if counted is None or counted.count >= wanted or time.perf_counter() > deadline:
            return now
        await asyncio.sleep(_POLL_S)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
