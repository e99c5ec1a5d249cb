"""Ports of this host for servers that open theirs only later."""

from __future__ import annotations

import itertools
import secrets
import socket
from pathlib import Path

from moegate.errors import InfraError

__all__ = ["free_port"]

_LOOPBACK = "127.0.0.1"
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST = 20_000
_ENOUGH = 1_000
_DRAWS = 200


def free_port() -> int:
    """A port of the loopback that is free now, and that no outgoing connection of this host takes until it is opened.

    An engine may load for minutes before it opens its own. So the port is drawn from below the range that the system
    gives away, and from above 10002 to 19999, which Ray gives its workers, where that leaves enough; else the system
    gives one.

    Raises:
        InfraError: no port is free.
    """
    try:
        first = int(_GIVEN_AWAY.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    draws = (secrets.choice(range(_LEAST, first)) for _ in range(_DRAWS if first >= _LEAST + _ENOUGH else 0))
    for port in itertools.chain(draws, [0]):
        with socket.socket() as sock:
            try:
                sock.bind((_LOOPBACK, port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise InfraError("this host has no free port")
