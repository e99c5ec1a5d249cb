"""The HTTP side: OpenAI-compatible `/v1/completions`, and what tells a measurement that it measured the right thing.

| path | answers |
|---|---|
| `GET /health` | 200 when the model is loaded, else 503 |
| `GET /v1/models` | the one model |
| `POST /v1/completions` | greedy completion of token ids, streamed or whole |
| `GET /v1/server_info` | proof of backend and configs, device, versions, batch sizes seen, peak memory |

All but `/health` want the key of the launch where there is one (`serving.apikey`): a 401 without it.
A body that cannot be served is a 4xx with OpenAI's error object; a full queue is a 503 with `Retry-After`. When a
client leaves, its request is cancelled and its slot is free at the next step. How long one is waited for is in
`serving.server.patience`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving import apikey
from serving.lifeline import resident_bytes
from serving.server.completions import BadRequest, Completion, Limits, Writer, parse
from serving.server.link import Link, Stream
from serving.server.patience import Patience, Send, Watched

__all__ = ["build"]

Answer = Callable[[Request], Awaitable[Response]]
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def build(link: Link, model: str, max_queue: int, patience: Patience | None = None) -> Starlette:
    """The application of one worker. `max_queue` requests may wait beside those that have a slot."""
    service = _Service(link, model, max_queue, patience or Patience())
    return Starlette(
        routes=[
            Route("/health", service.health, methods=["GET"]),
            Route("/v1/models", _keyed(service.models), methods=["GET"]),
            Route("/v1/completions", _keyed(service.completions), methods=["POST"]),
            Route("/v1/server_info", _keyed(service.server_info), methods=["GET"]),
        ],
        exception_handlers={BadRequest: _bad_request, ConnectionError: _lost},
    )


def _keyed(answer: Answer) -> Answer:
    """`answer` for those who have this launch's key, 401 for others, before anything of theirs is read."""

    async def guarded(request: Request) -> Response:
        if not apikey.admits(request.headers.get("authorization", "")):
            raise BadRequest(f"this server answers who sends the {apikey.VARIABLE} it was started with", status=401)
        return await answer(request)

    return guarded


class _Service:
    def __init__(self, link: Link, model: str, max_queue: int, patience: Patience) -> None:
        self.link, self.model, self.max_queue, self.patience = link, model, max_queue, patience
        self.created = int(time.time())

    async def health(self, request: Request) -> Response:
        up = self.link.ready.is_set() and not self.link.failed.is_set()
        return Response(status_code=200 if up else 503)

    async def models(self, request: Request) -> Response:
        info = self.link.info
        one = {"id": self.model, "object": "model", "created": self.created, "owned_by": "moegate",
               "max_model_len": info.get("max_model_len"), "vocab_size": info.get("vocab")}  # fmt: skip
        return JSONResponse({"object": "list", "data": [one]})

    async def server_info(self, request: Request) -> Response:
        self._ready()
        info = await self.link.ask()
        info["resident_bytes"]["http"] = resident_bytes()
        return JSONResponse({**info, "model": self.model, "open_requests": self.link.open_requests})

    async def completions(self, request: Request) -> Response:
        arrived = time.perf_counter()
        self._ready()
        info = self.link.info
        completion = parse(await self.patience.body(request), Limits(info["vocab"], info["max_model_len"], self.model))
        if self.link.open_requests >= info["slots"] + self.max_queue:
            raise BadRequest("the queue is full", status=503)
        stream = self.link.submit(completion.request())
        writer = Writer(stream.id, self.model, completion, arrived)
        if completion.stream:
            return _Streamed(self.link, stream, writer)
        return await _whole(request, self.link, stream, writer, completion)

    def _ready(self) -> None:
        if not self.link.ready.is_set() or self.link.failed.is_set():
            raise BadRequest("the model is not loaded", status=503)


class _Streamed(Response):
    """Sends tokens as they come; one write takes all that have come meanwhile, so a slow client gets fewer, larger."""

    def __init__(self, link: Link, stream: Stream, writer: Writer) -> None:
        super().__init__()
        self._link, self._stream, self._writer = link, stream, writer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        leaving = asyncio.ensure_future(_left(receive))
        watched = Watched(send)
        sending = asyncio.ensure_future(self._send(watched.send))
        try:
            await watched.until({leaving, sending})
        finally:
            self._link.close(self._stream)
            for task in (leaving, sending):
                task.cancel()
            results = await asyncio.gather(leaving, sending, return_exceptions=True)
        error = results[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            raise error

    async def _send(self, send: Send) -> None:
        started = False
        try:
            async for batch in self._stream.batches():
                if not started:  # with the first token: until then a failure can still be a proper 500
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                    started = True
                await send({"type": "http.response.body", "body": self._writer.chunk(batch), "more_body": True})
        except ConnectionError as error:
            await _send_failure(send, str(error), started)
            return
        await send({"type": "http.response.body", "body": self._writer.end(), "more_body": False})


async def _send_failure(send: Send, message: str, started: bool) -> None:
    """A failure in the stream's own format once it has begun, else as a 500."""
    body = json.dumps(_error(message, "server_error", None, 500)).encode()
    if started:
        await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
        return
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


async def _whole(request: Request, link: Link, stream: Stream, writer: Writer, completion: Completion) -> Response:
    """Collect the whole answer, unless the client leaves first."""

    async def collect() -> None:
        async for batch in stream.batches():
            writer.take(batch)

    leaving = asyncio.ensure_future(_left(request.receive))
    collecting = asyncio.ensure_future(collect())
    try:
        await asyncio.wait({leaving, collecting}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientDisconnect
        collecting.result()
        return JSONResponse(writer.whole())
    finally:
        link.close(stream)
        for task in (leaving, collecting):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(leaving, collecting, return_exceptions=True)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(message: str, kind: str, field: str | None, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse(_error(error.message, kind, error.field, error.status), error.status, headers)


async def _lost(request: Request, error: Exception) -> Response:
    return JSONResponse(_error(str(error), "server_error", None, 500), 500)
