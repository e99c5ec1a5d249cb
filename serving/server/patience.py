"""How long the server waits for its clients: for a body that does not come, for a reader that does not read.

| what | answer |
|---|---|
| a body announced as larger than MAX_BODY, or that grows over it | 413, without waiting for the rest |
| a body that is not there after BODY_S | 408 |
| a body that is still coming when the server is told to end | 503 |
| an answer whose client has read nothing for STALL_S | the connection is closed, the slot freed |
| an answer that is not over when the grace of a shutdown is | 503 where nothing was sent yet, else cut off |
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from serving.server.completions import BadRequest

__all__ = ["BODY_S", "MAX_BODY", "STALL_S", "Patience", "Watched"]

MAX_BODY = 8 << 20
BODY_S = 30.0
STALL_S = 60.0
_DRAIN_S = 1.0
_ENDING = "the server is ending"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Patience:
    """Waits for clients, and stops waiting when the server is to end. One per server; used on its event loop only."""

    def __init__(self, body_s: float = BODY_S) -> None:
        self.stopping = False
        self._body_s = body_s
        self._reading: set[asyncio.Task[Any]] = set()

    def stop(self) -> None:
        """The server ends: nobody's body is waited for any more."""
        self.stopping = True
        for task in self._reading:
            task.cancel()
        # What is cut off at the end of the grace is said once, by the server's own message, not once per connection.
        logging.getLogger("uvicorn.error").addFilter(lambda record: "returned without" not in record.getMessage())

    async def body(self, request: Request) -> bytes:
        """The whole body; BadRequest as the table above says."""
        if self.stopping:
            raise BadRequest(_ENDING, status=503)
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > MAX_BODY:
            await _discard(request)
            raise _too_large()
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            async with asyncio.timeout(self._body_s):
                return await _read(request)
        except TimeoutError:
            raise BadRequest(f"the body did not come within {self._body_s:g} s", status=408) from None
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            task.uncancel()
            raise BadRequest(_ENDING, status=503) from None
        finally:
            self._reading.discard(task)

    def guard(self, app: App) -> App:
        """The application, with requests that a shutdown cuts off ended quietly."""

        async def guarded(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            started = False

            async def noting(message: Message) -> None:
                nonlocal started
                started = True
                await send(message)

            try:
                await app(scope, receive, noting)
            except asyncio.CancelledError:
                if not self.stopping:
                    raise
                if not started:
                    await _unavailable(send)

        return guarded


class Watched:
    """Counts what a client takes, so that one that takes nothing for STALL_S can be given up."""

    def __init__(self, send: Send, stall_s: float = STALL_S) -> None:
        self._send, self._stall_s = send, stall_s
        self._begun = self._ended = 0

    async def send(self, message: Message) -> None:
        """Send one message; it waits while the client's buffers are full."""
        self._begun += 1
        await self._send(message)
        self._ended += 1

    async def until(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Wait until one of `tasks` is done, or until one message has waited for STALL_S."""
        stuck = -1
        while True:
            done, _ = await asyncio.wait(tasks, timeout=self._stall_s, return_when=asyncio.FIRST_COMPLETED)
            if done or (self._begun > self._ended and self._begun == stuck):
                return
            stuck = self._begun if self._begun > self._ended else -1


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY:
            raise _too_large()
    return bytes(data)


async def _discard(request: Request) -> None:
    """Take what is on its way for a moment: a client that is cut off while it sends never reads the answer."""
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for _ in request.stream():
                pass
    except (TimeoutError, ClientDisconnect):
        return


def _too_large() -> BadRequest:
    return BadRequest(f"the body is over {MAX_BODY} bytes", status=413)


async def _unavailable(send: Send) -> None:
    error = {"message": _ENDING, "type": "server_error", "param": None, "code": 503}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
