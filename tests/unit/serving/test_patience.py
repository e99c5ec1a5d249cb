"""What a slow or silent client gets, without a server around it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from serving.server.completions import BadRequest
from serving.server.patience import MAX_BODY, Patience, Watched


def request(*parts: bytes, told: int | None = None, silent: bool = False) -> Request:
    """A request whose body comes in `parts`; a silent client sends no more after them."""
    rest = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive() -> dict[str, Any]:
        if rest:
            return rest.pop(0)
        if silent:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if told is None else [(b"content-length", str(told).encode())]
    return Request({"type": "http", "headers": headers, "method": "POST"}, receive)


def status_of(what: Any) -> int:
    with pytest.raises(BadRequest) as caught:
        asyncio.run(what)
    return caught.value.status


def test_bodies() -> None:
    assert asyncio.run(Patience().body(request(b"ab", b"c"))) == b"abc"
    assert status_of(Patience().body(request(b"x" * (MAX_BODY // 2), b"x" * MAX_BODY))) == 413
    assert status_of(Patience().body(request(told=MAX_BODY + 1, silent=True))) == 413
    assert status_of(Patience(body_s=0.05).body(request(b"x", silent=True))) == 408


def test_the_end_of_the_server_is_the_end_of_waiting() -> None:
    async def stopped() -> bytes:
        patience = Patience()
        asyncio.get_running_loop().call_later(0.05, patience.stop)
        return await patience.body(request(b"x", silent=True))

    async def late() -> bytes:
        patience = Patience()
        patience.stop()
        return await patience.body(request(b"x"))

    async def cancelled_by_another() -> bytes:
        asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)  # type: ignore[union-attr]
        return await Patience().body(request(b"x", silent=True))

    assert status_of(stopped()) == 503
    assert status_of(late()) == 503
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_by_another())


@pytest.mark.parametrize(
    ("starts", "sent"), [(True, ["http.response.start"]), (False, ["http.response.start", "http.response.body"])]
)
def test_a_request_that_a_shutdown_cuts_off_ends_quietly(starts: bool, sent: list[str]) -> None:
    messages: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        messages.append(message)

    async def cut_off(stopping: bool) -> None:
        patience = Patience()
        task = asyncio.ensure_future(patience.guard(app)({}, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        if stopping:
            patience.stop()
        task.cancel()
        await task

    asyncio.run(cut_off(True))
    assert [message["type"] for message in messages] == sent
    if not starts:
        assert json.loads(messages[1]["body"])["error"]["code"] == 503
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cut_off(False))


def test_a_reader_that_takes_nothing_is_given_up_and_a_slow_one_is_not() -> None:
    async def waits(seconds: float, messages: int) -> tuple[bool, bool]:
        async def send(message: Any) -> None:
            await asyncio.sleep(seconds)

        watched = Watched(send, stall_s=0.2)

        async def all_of_them() -> None:
            for _ in range(messages):
                await watched.send({})

        sending = asyncio.ensure_future(all_of_them())
        quiet = asyncio.ensure_future(asyncio.sleep(30))
        await watched.until({sending, quiet})
        over = sending.done(), quiet.done()
        for task in (sending, quiet):
            task.cancel()
        return over

    assert asyncio.run(waits(60, 1)) == (False, False)
    assert asyncio.run(waits(0.06, 12)) == (True, False)
