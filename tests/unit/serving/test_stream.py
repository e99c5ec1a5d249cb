"""The client's reading of a server's event stream: counted, or the request's error, never an exception."""

from __future__ import annotations

import asyncio

import pytest

from serving.load.client import Event, _read

USAGE = b'data: {"choices":[],"usage":%s,"timing":%s}\n\n'
GOOD_USAGE, GOOD_TIMING = b'{"prompt_tokens":4,"completion_tokens":3}', b'{"ttft_s":0.1,"latency_s":0.2}'


def read_stream(*pieces: bytes) -> Event:
    class Content:
        def __init__(self) -> None:
            self.left = list(pieces)

        async def readany(self) -> bytes:
            return self.left.pop(0) if self.left else b""

    event = Event(index=0, asked=3, input_tokens=4)
    asyncio.run(_read(Content(), event))  # type: ignore[arg-type]
    return event


CONTENT, DONE = b'data: {"choices":[{"index":0}]}\n\n', b"data: [DONE]\n\n"


def test_a_whole_stream_is_counted() -> None:
    event = read_stream(CONTENT + USAGE % (GOOD_USAGE, GOOD_TIMING), DONE[:5], DONE[5:] + b"data: nonsense")
    assert (event.error, event.tokens, event.prompt_tokens) == (None, 3, 4)
    assert event.server == {"ttft_s": 0.1, "latency_s": 0.2}


@pytest.mark.parametrize(
    "usage",
    [b'{"completion_tokens":"3"}', b'{"completion_tokens":-1}', b'{"completion_tokens":1e9}', b"{" + b'"a":[' * 5000],
)
def test_a_usage_that_counts_nothing_is_the_requests_error(usage: bytes) -> None:
    event = read_stream(CONTENT + USAGE % (usage, b"{}") + DONE)
    assert "usage cannot be read" in (event.error or "")
    assert event.tokens == 0


@pytest.mark.parametrize(
    "timing", [b"[]", b'{"ttft_s":0.1}', b'{"ttft_s":"a","latency_s":1}', b'{"ttft_s":NaN,"latency_s":1}']
)
def test_a_timing_that_is_none_is_left_out(timing: bytes) -> None:
    event = read_stream(CONTENT + USAGE % (GOOD_USAGE, timing) + DONE)
    assert (event.error, event.server) == (None, None)


def test_an_event_without_an_end_does_not_fill_the_memory() -> None:
    event = read_stream(*[b"x" * (1 << 16)] * 100)
    assert "longer than" in (event.error or "")
