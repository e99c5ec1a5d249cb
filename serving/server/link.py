"""The HTTP process's view of the worker: start it, ask it, and hand its tokens to whoever waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from moegate.exits import Exit
from serving.server.channel import AsyncChannel, Message, pack
from serving.server.settings import Settings

__all__ = ["Link", "Stream", "Token", "WorkerProcess"]

Token = tuple[int, str | None, float | None, float]
"""(token id, finish reason or None, log-probability or None, the worker's clock in seconds)."""

_STOP_S = 5.0


class WorkerProcess:
    """The worker as a fresh process with one end of a socket pair; `sock` is the other end."""

    def __init__(self, settings: Settings) -> None:
        self.sock, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "serving.server.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.sock.sendall(pack({"settings": asdict(settings)}))

    def end(self) -> None:
        """Wait for the worker to end by itself (its socket is closed), then insist."""
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(eq=False)
class Stream:
    """The tokens of one request. Those that arrive together are handed out together."""

    id: int
    pending: list[Token] = field(default_factory=list)
    failure: str | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, token: Token) -> None:
        """Add one token (called by the link)."""
        self.pending.append(token)
        self._wake.set()

    def fail(self, reason: str) -> None:
        """End the stream with an error (called by the link)."""
        self.failure = reason
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Yield tokens as they come, up to the last one; ConnectionError where the worker failed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.pending:
                batch, self.pending = self.pending, []
                yield batch
                if batch[-1][1] is not None:
                    return
            if self.failure is not None:
                raise ConnectionError(self.failure)


class Link:
    """Talks to one worker. `ready` is set when it has loaded; `failed` when it is of no more use."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.info: dict[str, Any] = {}
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.exit = Exit.OK
        self.message = ""
        self._channel: AsyncChannel | None = None
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._infos: list[asyncio.Future[dict[str, Any]]] = []

    @property
    def open_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._streams)

    async def run(self) -> None:
        """Read the worker's messages until it ends."""
        self._channel = await AsyncChannel.open(self.worker.sock)
        try:
            while True:
                self._take(await self._channel.receive())
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail(Exit.REGRESSION, "the worker has ended")

    def submit(self, request: dict[str, Any]) -> Stream:
        """Send one request (fields of `batcher.Request` without its id) and return its stream."""
        stream = Stream(next(self._ids))
        self._streams[stream.id] = stream
        self._send({"op": "add", "request": {"id": stream.id, **request}})
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a request; one that has not ended is cancelled in the worker."""
        if self._streams.pop(stream.id, None) is not None:
            self._send({"op": "cancel", "id": stream.id})

    async def ask(self) -> dict[str, Any]:
        """The worker's account of itself, as of now."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._infos.append(future)
        self._send({"op": "info"})
        return await future

    def stop(self) -> None:
        """Ask the worker to end."""
        if self._channel is not None:
            with contextlib.suppress(ConnectionError):
                self._channel.send({"op": "stop"})
                self._channel.close()

    def _send(self, message: Message) -> None:
        if self._channel is None or self.failed.is_set():
            raise ConnectionError(self.message or "the worker is not there")
        self._channel.send(message)

    def _take(self, message: Message) -> None:
        match message["op"]:
            case "tokens":
                self._tokens(message)
            case "info":
                self._infos.pop(0).set_result(message["info"])
            case "ready":
                self.info = message["info"]
                self.ready.set()
            case "failed":
                self._fail(Exit(message["exit"]), message["message"])

    def _tokens(self, message: Message) -> None:
        at = message["at"]
        for request, token, finish, logprob in message["tokens"]:
            stream = self._streams.get(request)
            if stream is None:
                continue  # its client has left
            stream.put((token, finish, logprob, at))
            if finish is not None:
                del self._streams[request]

    def _fail(self, code: Exit, message: str) -> None:
        if self.failed.is_set():
            return
        self.exit, self.message = code, message
        self.failed.set()
        for stream in self._streams.values():
            stream.fail(message)
        self._streams.clear()
        for future in self._infos:
            if not future.done():
                future.set_exception(ConnectionError(message))
        self._infos.clear()
