"""Messages between the HTTP process and the worker: JSON objects with a length in front, over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
import time
from typing import Any

__all__ = ["AsyncChannel", "Channel", "Message", "pack"]

Message = dict[str, Any]

_HEAD = struct.Struct(">I")
_CHUNK = 1 << 18


def pack(message: Message) -> bytes:
    """One message as bytes."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD.pack(len(body)) + body


class Channel:
    """The worker's end: blocking, with a poll. A closed peer raises EOFError."""

    def __init__(self, handle: int) -> None:
        self._socket = socket.socket(fileno=handle)
        self._buffer = bytearray()
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send one message, waiting for room."""
        try:
            self._socket.sendall(pack(message))
        except OSError as error:
            raise EOFError(str(error)) from None

    def linger(self, seconds: float) -> None:
        """Drop what still comes until the peer closes, at most `seconds`.

        For the last message: closed with something unread, this end would reset the other, and its message be lost.
        """
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while (left := until - time.monotonic()) > 0:
                if self._poller.poll(1000 * left) and not self._socket.recv(_CHUNK):
                    return

    def receive(self, wait: bool) -> list[Message]:
        """Return the messages that have arrived; with `wait`, at least one."""
        messages = self._parse()
        while self._poller.poll(None if wait and not messages else 0):
            data = self._socket.recv(_CHUNK)
            if not data:
                raise EOFError("the server is gone")
            self._buffer += data
            messages += self._parse()
        return messages

    def _parse(self) -> list[Message]:
        messages: list[Message] = []
        while len(self._buffer) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                break
            messages.append(json.loads(self._buffer[_HEAD.size : end]))
            del self._buffer[:end]
        return messages


class AsyncChannel:
    """The HTTP process's end. A closed peer raises EOFError (as `asyncio.IncompleteReadError`)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncChannel:
        """Wrap a connected socket."""
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 22))

    def send(self, message: Message) -> None:
        """Queue one message."""
        self._writer.write(pack(message))

    async def receive(self) -> Message:
        """Wait for the next message."""
        (length,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        message: Message = json.loads(await self._reader.readexactly(length))
        return message

    def close(self) -> None:
        """Close this end; the worker stops when it sees that."""
        self._writer.close()
