"""What a server says that it measured itself: vLLM's histograms, read before and after a load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from serving.load.client import Target
from serving.load.drive import Run, drive
from serving.load.served import Total, means, read, settled, totals
from serving.load.workload import Workload

PAGE = """# HELP vllm:request_time_per_output_token_seconds Histogram of time_per_output_token_seconds per request.
# TYPE vllm:request_time_per_output_token_seconds histogram
vllm:request_time_per_output_token_seconds_bucket{{engine="0",le="0.01",model_name="/a}} b"}} 1.0
vllm:request_time_per_output_token_seconds_count{{engine="0",model_name="/a}} b"}} {tpots}.0
vllm:request_time_per_output_token_seconds_sum{{engine="0",model_name="/a}} b"}} {tpot}
vllm:request_time_per_output_token_seconds_count{{engine="1",model_name="/a}} b"}} 1.0
vllm:request_time_per_output_token_seconds_sum{{engine="1",model_name="/a}} b"}} 5e-03
vllm:request_time_per_output_token_seconds_created{{engine="0",model_name="/a}} b"}} 1.7e+09
vllm:inter_token_latency_seconds_count{{engine="0",model_name="/a}} b"}} {itls}.0
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="/a}} b"}} {itl}
vllm:time_to_first_token_seconds_count 0.0
vllm:time_to_first_token_seconds_sum nan
process_cpu_seconds_total 12.5
"""


def page(tpots: int, tpot: float, itls: int = 0, itl: float = 0.0) -> str:
    return PAGE.format(tpots=tpots, tpot=tpot, itls=itls, itl=itl)


def test_sums_and_counts_are_read_over_all_engines() -> None:
    found = totals(page(3, 0.027, 12, 0.11))
    assert found["tpot"] == Total(pytest.approx(0.032), 4)
    assert found["itl"] == Total(pytest.approx(0.11), 12)
    assert found["ttft"] == Total(0.0, 0)
    assert totals("nothing of the kind\n") == {}


def test_means_are_of_what_came_between() -> None:
    before, after = totals(page(3, 0.027, 12, 0.11)), totals(page(7, 0.067, 24, 0.23))
    found = means(before, after, 4)
    assert found is not None
    assert found["requests"] == 4
    assert found["mean_tpot_ms"] == pytest.approx(10.0)
    assert found["mean_itl_ms"] == pytest.approx(10.0)
    assert "mean_ttft_ms" not in found


@pytest.mark.parametrize("requests", [0, 3, 5])
def test_means_of_other_requests_are_none(requests: int) -> None:
    """One that another client sent, or that was given up, is in the server's numbers and in nobody else's."""
    assert means(totals(page(3, 0.027)), totals(page(7, 0.067)), requests) is None
    assert means({}, {}, 4) is None


def test_a_server_that_began_anew_tells_nothing() -> None:
    before, after = totals(page(3, 0.9, 12, 0.11)), totals(page(7, 0.067, 24, 0.23))
    assert means(before, after, 4) is None, "as many requests, in less than no time"
    assert means(totals(page(3, 0.027, 30, 0.3)), after, 4) is None


def test_numbers_beyond_all_numbers_are_left_out() -> None:
    found = means({}, totals(page(3, 0.027, 1, 1.7e308)), 4)
    assert found is not None
    assert "mean_itl_ms" not in found
    assert "mean_tpot_ms" in found


@pytest.mark.parametrize("text", ["a_sum{" * 200_000, "a_sum" * 200_000, "_sum{" + "} x" * 300_000, "{} 1\n" * 200_000])
def test_nonsense_is_passed_over_in_no_time(text: str) -> None:
    began = time.process_time()
    assert totals(text) == {}
    assert time.process_time() - began < 5


class Engine:
    """Answers completions, and counts one only after some time, as a server does whose log comes after the answer."""

    def __init__(self, *, late_s: float = 0.1, shows: bool = True) -> None:
        self.late_s, self.shows, self.counted, self.seconds, self.reads = late_s, shows, 5, 0.05, 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["max_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(asked):
            await response.write(b'data: {"choices":[{"text":"t"}]}\n\n')
        await response.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % asked)
        asyncio.get_running_loop().call_later(self.late_s, self._count, 0.002 if asked == 4 else 0.5)
        return response

    def _count(self, seconds: float) -> None:
        self.counted, self.seconds = self.counted + 1, self.seconds + seconds

    async def metrics(self, _: web.Request) -> web.Response:
        self.reads += 1
        return web.Response(text=page(self.counted, self.seconds)) if self.shows else web.Response(status=404)


def against(engine: Engine, act: Callable[[str], Awaitable[object]]) -> object:
    async def main() -> object:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", engine.complete), web.get("/metrics", engine.metrics)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return await act(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


LOAD = Workload(requests=6, input=3, output=4, seed=0, vocab=9, concurrency=2)


def test_a_load_has_the_servers_means_of_its_own_requests_and_of_no_warm_up() -> None:
    run = against(Engine(), lambda url: drive(Target(url, "m"), LOAD, 2))
    assert isinstance(run, Run)
    assert run.served is not None
    assert run.served["requests"] == 6
    assert run.served["mean_tpot_ms"] == pytest.approx(2.0)  # a warm-up's were 500


def test_who_asks_is_called_between_the_warm_up_and_the_load() -> None:
    engine, seen = Engine(late_s=0.0), []
    run = against(engine, lambda url: drive(Target(url, "m"), LOAD, 2, lambda: seen.append(engine.counted)))
    assert isinstance(run, Run)
    assert seen == [5 + len(run.warm_up)]
    assert engine.counted == seen[0] + 6


def test_an_error_of_any_bytes_is_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def complete(_: web.Request) -> web.Response:
        return web.Response(status=500, body=b"\xff" + b"x" * (4 << 20), content_type="text/plain", charset="utf-8")

    engine = Engine()
    monkeypatch.setattr(engine, "complete", complete)
    run = against(engine, lambda url: drive(Target(url, "m"), LOAD, 2))
    assert isinstance(run, Run)
    assert {event.error for event in run.events} == {"HTTP 500: \ufffd" + "x" * 299}


def test_a_server_without_histograms_is_asked_once() -> None:
    engine = Engine(shows=False)
    run = against(engine, lambda url: drive(Target(url, "m"), LOAD, 2))
    assert isinstance(run, Run)
    assert run.served is None
    assert engine.reads == 1


def test_waiting_for_a_count_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.load.served._PATIENCE_S", 0.2)

    async def wait(url: str) -> object:
        async with aiohttp.ClientSession() as session:
            return await settled(session, url, {"tpot": Total(0.0, 6)}, 1)

    assert against(Engine(), wait) == totals(page(5, 0.05))


@pytest.mark.parametrize(
    "body",
    [page(3, 0.027).encode() + b"#" * 400, b"vllm:time_to_first_token_seconds_count 9\n", b"\xff\xfe\x00", b""],
)
def test_what_is_cut_or_foreign_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr("serving.load.served._MOST_BYTES", 1000)
    engine, asked = Engine(), []

    async def metrics(_: web.Request) -> web.Response:
        asked.append(1)
        return web.Response(body=body)

    monkeypatch.setattr(engine, "metrics", metrics)

    async def act(url: str) -> object:
        async with aiohttp.ClientSession() as session:
            return await read(session, url), await settled(session, url, {"tpot": Total(0.0, 6)}, 1)

    once, later = against(engine, act)  # type: ignore[misc]
    assert once == later
    assert "tpot" not in once
    assert len(asked) == 2
