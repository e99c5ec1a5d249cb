"""A long, unfriendly load: good requests among malformed ones, prompts that do not fit, clients that hang up or stall.

    serving launch --model examples/models/tiny-moe -- python -m serving.load.soak --seconds 1800 --concurrency 8

It fails where a good request is not answered, or answered differently than at first; where a bad one gets anything but
a 4xx; where a slot stays taken when everybody has gone; and where the server's memory at the end is more than 5 % above
what it was once everything had been used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from serving import apikey

__all__ = ["Outcome", "main", "soak"]

_POOL = 24
_SAMPLE_S = 2.0
_WEIGHTS = {"stream": 55, "whole": 10, "vanish": 20, "malformed": 8, "oversized": 4, "silent": 2, "announced": 1}
_MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[1,2",
    b'{"prompt":"text"}',
    b'{"prompt":[1,2],"max_tokens":-1}',
    b'{"prompt":[-5]}',
    b'{"prompt":[1],"temperature":0.9}',
    b'{"prompt":[1],"n":3}',
    b"\xff\xfe\x00",
    b'{"prompt":{"a":1}}',
    b'{"prompt":[1e400]}',
    b"[" * 5000,
)


@dataclass
class Outcome:
    """What a soak found. `memory` is the server's resident bytes over time; `faults` is empty where all was well."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """Memory of the last quarter over that of the second, less one (the first quarter warms up)."""
        quarter = len(self.memory) // 4
        if quarter < 1:
            return 0.0
        early, late = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        return statistics.median(late) / statistics.median(early) - 1

    def fault(self, text: str) -> None:
        """Note one fault (the first hundred are kept)."""
        self.counts["faults"] += 1
        if len(self.faults) < 100:
            self.faults.append(text)


class _Soak:
    def __init__(self, session: aiohttp.ClientSession, url: str, info: dict[str, Any], seed: int) -> None:
        self.session, self.url, self.outcome = session, url + "/v1/completions", Outcome()
        self.draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.room, vocab = int(info["max_model_len"]), int(info["vocab"])
        shapes = [(self.draw.randint(1, 40), self.draw.randint(1, 40)) for _ in range(_POOL)]
        self.pool = [([self.draw.randrange(vocab) for _ in range(size)], output) for size, output in shapes]
        self.answers: dict[int, list[int]] = {}

    async def one(self, kind: str | None = None) -> None:
        kind = kind or self.draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        self.outcome.counts[kind] += 1
        match kind:
            case "malformed":
                await self._bad(self.draw.choice(_MALFORMED))
            case "oversized":
                await self._bad(json.dumps({"prompt": [1] * (self.room + 1)}).encode())
            case "vanish":
                await self._vanish()
            case "silent":
                await self._half(1000, self.draw.random() * 0.5)
            case "announced":
                answer = await self._half(1 << 40, 20.0)
                if not answer.startswith(b"HTTP/1.1 413 "):
                    self.outcome.fault(f"a body of a terabyte got {answer[:40]!r}")
            case _:
                await self.good(self.draw.randrange(_POOL), stream=kind == "stream")

    async def good(self, index: int, stream: bool) -> None:
        prompt, output = self.pool[index]
        body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": stream}
        async with self.session.post(self.url, json=body) as response:
            text = await response.read()
        if response.status != 200:
            self.outcome.fault(f"a good request got {response.status}: {text[:200]!r}")
            return
        tokens = _tokens(text, stream)
        first = self.answers.setdefault(index, tokens)
        if len(tokens) != output or tokens != first:
            self.outcome.fault(f"prompt {index} was answered {tokens}, at first {first}")

    async def _bad(self, body: bytes) -> None:
        async with self.session.post(self.url, data=body) as response:
            await response.read()
        if not 400 <= response.status < 500:
            self.outcome.fault(f"a bad request got {response.status}: {body[:60]!r}")

    async def _vanish(self) -> None:
        prompt, _ = self.pool[self.draw.randrange(_POOL)]
        room = self.room - len(prompt)
        body = {"prompt": prompt, "max_tokens": room, "ignore_eos": True, "stream": self.draw.random() < 0.7}
        wait = self.draw.random() * 0.2
        try:
            async with asyncio.timeout(wait), self.session.post(self.url, json=body) as response:
                await response.read()
        except TimeoutError:
            return

    async def _half(self, length: int, seconds: float) -> bytes:
        """Announce a body of `length` bytes, send two, and read what comes within `seconds`; then hang up."""
        place = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            sent = {"Host": "x", **apikey.headers(), "Content-Length": str(length)}
            lines = [f"POST {place.path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", "{1"]
            writer.write("\r\n".join(lines).encode())
            async with asyncio.timeout(seconds):
                return await reader.read(1 << 10)
        except TimeoutError:
            return b""
        finally:
            writer.close()


def _tokens(text: bytes, stream: bool) -> list[int]:
    if not stream:
        return list(json.loads(text)["choices"][0]["token_ids"])
    events = [line[6:] for line in text.split(b"\n\n") if line.startswith(b"data: {")]
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


async def soak(base_url: str, seconds: float, concurrency: int, seed: int = 0) -> Outcome:
    """Soak the moegate server at `base_url`."""
    timeout = aiohttp.ClientTimeout(total=120)
    began = time.monotonic()
    deadline = began + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=apikey.headers()) as session:

        async def info() -> dict[str, Any]:
            async with session.get(base_url + "/v1/server_info") as response:
                answer: dict[str, Any] = await response.json()
                return answer

        work = _Soak(session, base_url.rstrip("/"), await info(), seed)
        outcome = work.outcome
        for index in range(_POOL):
            await work.good(index, stream=True)
        for kind in _WEIGHTS:  # however short it is, it has seen everything once
            await work.one(kind)

        async def lane() -> None:
            while time.monotonic() < deadline:
                try:
                    await work.one()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    outcome.fault(f"{type(error).__name__}: {error}")

        async def watch() -> None:
            while time.monotonic() < deadline:
                await asyncio.sleep(min(_SAMPLE_S, seconds / 20))
                outcome.memory.append(sum((await info())["resident_bytes"].values()))

        await asyncio.gather(watch(), *(lane() for _ in range(concurrency)))
        for _ in range(100):
            last = await info()
            if last["free_slots"] == last["slots"] and not last["open_requests"]:
                break
            await asyncio.sleep(0.1)
        else:
            outcome.fault(f"slots stay taken: {last['slots'] - last['free_slots']} of {last['slots']}")
    outcome.seconds = time.monotonic() - began
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print one JSON document; 1 where anything was wrong."""
    options = argparse.ArgumentParser("soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--base-url", default=os.environ.get("MOEGATE_BASE_URL"), help="the server (default: $MOEGATE_BASE_URL)"
    )
    options.add_argument("--seconds", type=float, default=1800, help="how long (default: 1800)")
    options.add_argument("--concurrency", type=int, default=8, help="clients at once (default: 8)")
    options.add_argument("--seed", type=int, default=0, help="of what the clients do (default: 0)")
    options.add_argument(
        "--max-growth", type=float, default=0.05, help="fraction that memory may grow by (default: 0.05)"
    )
    args = options.parse_args(argv)
    if not args.base_url:
        options.error("--base-url, or MOEGATE_BASE_URL")
    outcome = asyncio.run(soak(args.base_url, args.seconds, args.concurrency, args.seed))
    if outcome.growth > args.max_growth:
        outcome.fault(f"memory grew by {outcome.growth:.1%}")
    json.dump(
        {
            "seconds": round(outcome.seconds, 1),
            "requests": dict(outcome.counts),
            "memory_first": outcome.memory[:1],
            "memory_last": outcome.memory[-1:],
            "memory_growth": round(outcome.growth, 4),
            "faults": outcome.faults,
        },
        sys.stdout,
        indent=1,
    )
    print()
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
