"""One streamed completion over HTTP: send, stamp every arrival, read the server's usage, judge.

Events are not parsed as they come: a stamp must not wait for a JSON parser. Only the one with the usage is.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serving.load.workload import Call

__all__ = ["Event", "Target", "refusal", "send"]

_READ_S = 600.0
_MOST_BYTES = 1 << 20
"""An event beyond this is no event of a completion; without a limit a server could fill our memory with one."""
_SHOWN = 1200  # bytes of an error's body
_MOST_TOKENS = 1 << 30
_MOST_S = 1e6
_TIMING = ("ttft_s", "latency_s")


@dataclass(frozen=True)
class Target:
    """Where requests go. `model` is the name that the server expects in a body."""

    base_url: str
    model: str
    timeout_s: float = _READ_S

    @property
    def url(self) -> str:
        """The endpoint."""
        return self.base_url.rstrip("/") + "/v1/completions"


@dataclass
class Event:
    """What happened to one request; all times are seconds on the client's monotonic clock.

    `arrivals` has one stamp per received piece with content; a piece may hold several tokens. `tokens` is the server's
    own count of output tokens (usage), 0 where it gave none. `server` is its `timing`, where it tells.
    """

    index: int
    asked: int
    input_tokens: int
    scheduled: float | None = None
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None
    server: dict[str, float] | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended without an error."""
        return self.error is None

    @property
    def short(self) -> bool:
        """Whether it ended well but with another number of tokens than was asked for."""
        return self.error is None and self.tokens != self.asked

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first content."""
        return self.arrivals[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last content."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for a single token."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


def body(call: Call, model: str) -> bytes:
    """The request's body: token ids, greedy, exactly `output` tokens, with usage at the end."""
    return json.dumps(
        {
            "model": model,
            "prompt": call.prompt,
            "max_tokens": call.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()


async def send(session: aiohttp.ClientSession, target: Target, call: Call, event: Event) -> None:
    """Send one request and fill `event`. Errors are noted, not raised."""
    data = body(call, target.model)
    event.sent = time.perf_counter()
    try:
        async with session.post(target.url, data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                event.error = await refusal(response)
                return
            await _read(response.content, event)
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
        event.error = f"{type(error).__name__}: {error}"[:300]


async def refusal(response: aiohttp.ClientResponse) -> str:
    """Status and beginning of an answer that is none; whatever it holds, and however long it is."""
    text = (await response.content.read(_SHOWN)).decode(errors="replace")
    return f"HTTP {response.status}: {text[:300]}"


async def _read(content: aiohttp.StreamReader, event: Event) -> None:
    tail = b""
    done = False
    usage: bytes | None = None
    while not done:
        data = await content.readany()
        now = time.perf_counter()
        if not data:
            break
        *events, tail = (tail + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for item in events:
            if item == b"data: [DONE]":
                done = True
                break
            if b'"choices":[{' in item or b'"choices": [{' in item:
                event.arrivals.append(now)
            if b'"usage":{' in item or b'"usage": {' in item:
                usage = item
            elif item.startswith((b'data: {"error"', b'data: {"object":"error"')):
                event.error = item[6:].decode(errors="replace")[:300]
                return
        if len(tail) > _MOST_BYTES:
            event.error = f"an event is longer than {_MOST_BYTES} bytes"
            return
    _finish(event, usage, done)


def _finish(event: Event, usage: bytes | None, done: bool) -> None:
    if usage is not None:
        try:
            _count(event, json.loads(usage.partition(b"data:")[2]))
        except (ValueError, RecursionError) as error:
            event.error = f"the server's usage cannot be read: {error}"[:300]
            return
    if not done:
        event.error = "the stream ended without [DONE]"
    elif not event.arrivals:
        event.error = "no content came"
    elif not event.tokens:
        event.error = "the server gave no usage"


def _count(event: Event, last: Any) -> None:
    """Take over what the last event counts. ValueError where it counts nothing that can be."""
    usage = last.get("usage") if isinstance(last, dict) else None
    if not isinstance(usage, dict):
        raise ValueError("it is no object")
    event.tokens = _tokens(usage.get("completion_tokens"))
    event.prompt_tokens = _tokens(usage.get("prompt_tokens"))
    timing = last.get("timing")
    if isinstance(timing, dict) and all(_is_seconds(timing.get(name)) for name in _TIMING):
        event.server = {name: float(timing[name]) for name in _TIMING}


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_S


def _tokens(value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise ValueError(f"{str(value)[:40]} is no number of tokens")
    return value
