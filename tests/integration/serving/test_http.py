"""The server over real HTTP: answers, refusals, a full queue, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

GOOD = {"prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True}


def call(url: str, path: str, body: object = None, raw: bytes | None = None) -> tuple[int, dict, dict]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request("GET" if data is None else "POST", path, body=data)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else {}, dict(response.getheaders())


def events(url: str, body: dict) -> list[str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("POST", "/v1/completions", body=json.dumps(body).encode())
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/event-stream")
    text = response.read().decode()
    connection.close()
    return [line.removeprefix("data: ") for line in text.strip().split("\n\n")]


def test_a_stream_and_a_whole_answer_agree(server: str) -> None:
    status, whole, _ = call(server, "/v1/completions", GOOD)
    assert status == 200
    *chunks, usage, done = events(server, {**GOOD, "stream": True, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    ids = [token for chunk in parsed for token in chunk["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert len(ids) == 6
    assert json.loads(usage)["usage"] == whole["usage"]
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in parsed} == {"text_completion"}
    assert events(server, {**GOOD, "stream": True})[-1] == "[DONE]"


def test_models_health_and_unknown_paths(server: str) -> None:
    status, models, _ = call(server, "/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "tiny-moe", 512)
    assert call(server, "/health")[0] == 200


@pytest.mark.parametrize(
    ("raw", "status", "field"),
    [
        (b"{", 400, None), (b"", 400, None), (b'{"prompt": "text"}', 400, "prompt"),
        (b'{"prompt": [512]}', 400, "prompt"),
        (json.dumps({"prompt": [1] * 600}).encode(), 400, "prompt"),
        (json.dumps({**GOOD, "temperature": 1.0}).encode(), 400, "temperature"),
        (json.dumps({**GOOD, "model": "gpt"}).encode(), 404, "model"), (b"[" + b"1," * 5_000_000 + b"1]", 413, None),
    ],
)  # fmt: skip
def test_bad_bodies_get_openais_error(server: str, raw: bytes, status: int, field: str | None) -> None:
    got, body, _ = call(server, "/v1/completions", raw=raw)
    assert (got, body["error"]["param"]) == (status, field)
    assert body["error"]["type"] == "invalid_request_error"
    assert call(server, "/v1/completions", GOOD)[0] == 200, "the server goes on"


async def _leave(session: aiohttp.ClientSession, url: str, body: dict, after: int) -> None:
    """Read `after` chunks of an answer, then hang up."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        for _ in range(after):
            await response.content.readuntil(b"\n\n")
        response.close()


def _rows(url: str) -> int:
    """How many rows the server has decoded so far, all steps together."""
    return sum(int(size) * steps for size, steps in call(url, "/v1/server_info")[1]["batch_sizes"].items())


def test_clients_that_leave_free_their_slots(server: str, until) -> None:
    long = {**GOOD, "max_tokens": 480, "stream": True}

    async def crowd() -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(_leave(session, server, long, after) for after in (1, 2, 3, 1, 1, 2)))
            # One that leaves before a whole answer is there, and one that never reads.
            task = asyncio.ensure_future(session.post(f"{server}/v1/completions", json={**long, "stream": False}))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # an answer that has come all the same is to be closed
                (await task).close()

    before = _rows(server)
    asyncio.run(crowd())
    counts = {"free_slots": 4, "running": 0, "waiting": 0, "open_requests": 0}
    until(lambda: counts.items() <= call(server, "/v1/server_info")[1].items())
    # Nobody cut short: seven times 479 after the prompts. How many are made before the word comes is the machine's.
    assert _rows(server) - before < 7 * 479
    assert call(server, "/v1/completions", GOOD)[0] == 200


def test_a_full_queue_is_a_503_and_nobody_admitted_is_lost(served: tuple[str, int]) -> None:
    """The worker stands still while they come, so that none of them is over before all are there."""
    url, worker = served
    body = {**GOOD, "max_tokens": 300}

    async def crowd() -> tuple[list[int], list[int]]:
        async with aiohttp.ClientSession() as session:

            async def one() -> int:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status == 200:
                        assert len(answer["choices"][0]["token_ids"]) == 300
                    else:
                        assert response.headers["Retry-After"] == "1"
                    return response.status

            tasks = [asyncio.ensure_future(one()) for _ in range(16)]
            answers = asyncio.as_completed(tasks, timeout=120)
            refused = [await next(answers) for _ in range(6)]
            os.kill(worker, signal.SIGCONT)
            return refused, [await answer for answer in answers]

    os.kill(worker, signal.SIGSTOP)
    try:
        refused, admitted = asyncio.run(crowd())
    finally:
        os.kill(worker, signal.SIGCONT)
    assert refused == [503] * 6
    assert admitted == [200] * 10, "four slots and six that may wait"


def test_answers_are_the_same_alone_and_in_a_crowd(server: str) -> None:
    prompts = [[index * 5 + 1, 7, index] for index in range(8)]
    alone = [call(server, "/v1/completions", {**GOOD, "prompt": p})[1]["choices"][0]["token_ids"] for p in prompts]

    async def crowd() -> list[list[int]]:
        async with aiohttp.ClientSession() as session:

            async def one(prompt: list[int]) -> list[int]:
                async with session.post(f"{server}/v1/completions", json={**GOOD, "prompt": prompt}) as response:
                    return (await response.json())["choices"][0]["token_ids"]

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(crowd()) == alone


def test_server_info_is_proof(server: str) -> None:
    call(server, "/v1/completions", GOOD)
    info = call(server, "/v1/server_info")[1]
    proof = info["proof"]
    assert (proof["engine"], proof["requested_backend"], proof["resolved_backend"]) == ("moegate", "auto", "torch")
    assert proof["chain"][-1]["chosen"]
    assert proof["functions"]["fused_experts"] == "xkernels.ops._details.experts.run_torch"
    assert proof["functions"]["topk"] == "xkernels.ops.topk.topk_reference"
    assert {"decode_attention", "store_kv_cache"} <= proof["functions"].keys()
    assert set(proof["calls"]) == {"torch"}
    assert proof["calls"]["torch"] == sum(info["batch_sizes"].values())  # one MoE layer
    assert info["device"]["kind"] == "cpu"
    assert info["peak_memory_bytes"] > 1 << 20


def half_a_request(url: str, length: int, body: bytes = b"") -> socket.socket:
    """A connection whose client announces `length` bytes, sends `body`, and then says nothing more."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (length, body))
    return connection


def test_a_body_announced_as_too_large_is_refused_before_it_comes(server: str) -> None:
    with half_a_request(server, 10**10, b"[" * 1000) as connection:  # one that was waited for would be a 408
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
    assert call(server, "/v1/completions", GOOD)[0] == 200


def test_a_shutdown_waits_for_nobodys_body_and_prints_no_traceback(
    tmp_path: Path, start: Callable, until: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(tmp_path, "--slots=2", "--configs=none") as (url, _):
        waiting = [half_a_request(url, 1000, b"[1"), half_a_request(url, 1000)]
        long = json.dumps({**GOOD, "max_tokens": 400, "stream": True}).encode()
        waiting += [half_a_request(url, len(long), long) for _ in range(3)]  # they never read
        until(lambda: call(url, "/v1/server_info")[1]["batch_sizes"])  # what was sent first has come by then
    assert waiting[0].recv(1000).startswith(b"HTTP/1.1 503 "), "whose body was waited for would have a 408"
    for connection in waiting:
        connection.close()
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "CancelledError" not in said
