"""The Docker daemon of this host: a negotiated connection, what it is, and which failures are its own.

Both the image builder and the container isolation stand on this leaf. The docker package is imported when it is
first needed, because most commands never talk to a daemon.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate.errors import PoolError

__all__ = ["LABEL", "DaemonFacts", "answers", "connect", "facts", "is_gone", "is_missing", "reason"]

_USUAL = ("/var/run/docker.sock", "/run/docker.sock")
_JOIN = "as root: usermod -aG docker USER, and log in again; or use isolation: process"

LABEL = "moegate"
"""Prefix of our labels. Whatever carries `moegate.run` is ours to end; nothing else is."""


@dataclass(frozen=True)
class DaemonFacts:
    """Which daemon a run really talked to (a context can silently point elsewhere).

    `cdi` holds the device names that it resolves itself (`nvidia.com/gpu=GPU-...`); only Engine 28.2 and later tell.
    `root` is the daemon's data folder, on its own host.
    """

    id: str
    version: str
    api: str
    address: str
    storage: str
    cgroup: str
    cdi: frozenset[str] = frozenset()
    root: str = ""
    context: str = ""

    def record(self) -> dict[str, str]:
        """As text values, for keys and records."""
        return {
            "docker.id": self.id,
            "docker.version": self.version,
            "docker.api": self.api,
            "docker.address": self.address,
            "docker.context": self.context,
            "docker.storage": self.storage,
            "docker.cgroup": self.cgroup,
        }


def connect(timeout_s: float | None = 60.0) -> Any:
    """Return a `docker.DockerClient` for the daemon that the environment or the current context names.

    The API version is negotiated, so that engines from 20.10 (1.41) to 29 (1.5x) work. `timeout_s` bounds each read
    of an answer; None waits for ever, as following a log needs.

    Raises:
        PoolError: no daemon answers, or what the environment or the context says of it makes no sense.
    """
    import docker
    from docker.transport import unixconn

    unixconn.UnixHTTPConnection.connect = _connect_or_close
    _, address = _place()
    fix = _start(address)
    refused = _refusal(address)
    if isinstance(refused, PermissionError):
        raise PoolError(f"this user may not talk to the Docker daemon at {address} (fix: {_JOIN})")
    if refused is not None:
        raise PoolError(f"no Docker daemon listens at {address} (fix: {fix})")
    client = None
    try:
        client = docker.from_env(version="auto", timeout=timeout_s)
        client.ping()
    except Exception as error:  # also ValueError, AttributeError: of an address without sense, of a foreign answer
        if client is not None:
            client.close()
        raise PoolError(f"no Docker daemon answers at {address}: {reason(error)} (fix: {fix})") from None
    return client


def _connect_or_close(connection: Any) -> None:
    """What the docker package does to connect, save that a refused socket is closed, which it leaves open."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(connection.timeout)
        sock.connect(connection.unix_socket)
    except BaseException:
        sock.close()
        raise
    connection.sock = sock


def answers() -> bool:
    """Whether something listens where the daemon should; true for a daemon that is not on a Unix socket."""
    try:
        _, address = _place()
    except PoolError:
        return False
    return _refusal(address) is None


def _start(address: str) -> str:
    """What helps where no daemon answers: in a checkout of ours its own script, which starts one at the usual place."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "docker-daemon.sh"
    if address.removeprefix("unix://") not in _USUAL or not script.is_file():
        return "start one, or use isolation: process"
    here = Path.cwd()
    return f"as root: {script.relative_to(here) if script.is_relative_to(here) else script}, or isolation: process"


def _refusal(address: str) -> Exception | None:
    """Why nothing can be said to what should listen there; None where it can, or is not on a Unix socket."""
    if not address.startswith("unix://"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(10.0)
            probe.connect(address.removeprefix("unix://"))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            return error
    return None


def _place() -> tuple[str, str]:
    """The name of the context that is in force, and where it says that the daemon is.

    `DOCKER_HOST` overrides all contexts, and `DOCKER_CONTEXT` the chosen one, as Docker's own command has it.

    Raises:
        PoolError: there is no such context, or its file is damaged.
    """
    chosen = os.environ.get("DOCKER_HOST")
    if chosen:
        return "DOCKER_HOST", chosen
    from docker.context import ContextAPI
    from docker.context.config import get_current_context_name

    fix = "choose another with `docker context use` or DOCKER_CONTEXT"
    try:
        name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
        context = ContextAPI.get_context(name)
    except Exception as error:  # whatever a damaged file leads the docker package to: it raises Exception itself
        raise PoolError(f"the Docker context cannot be read: {type(error).__name__}: {reason(error)} (fix: {fix})"
                        ) from None  # fmt: skip
    if context is None:
        raise PoolError(f"the Docker context {name!r} is not there (fix: {fix})")
    address = str(getattr(context, "Host", "") or "unix:///var/run/docker.sock").replace("http+unix://", "unix://")
    return str(context.name), address


def facts(client: Any) -> DaemonFacts:
    """Ask the daemon who it is."""
    info = client.info()
    context, address = _place()
    return DaemonFacts(
        id=str(info.get("ID", "")),
        version=str(info.get("ServerVersion", "")),
        api=str(client.api.api_version),
        address=address,
        context=context,
        storage=str(info.get("Driver", "")),
        root=str(info.get("DockerRootDir", "")),
        cgroup=f"v{info.get('CgroupVersion', '1')} {info.get('CgroupDriver', '')}".strip(),
        cdi=frozenset(
            str(item.get("ID")) for item in info.get("DiscoveredDevices") or () if item.get("Source") == "cdi"
        ),
    )


def is_gone(error: BaseException) -> bool:
    """Whether the daemon itself did not answer (it was stopped, or an answer did not come in time)."""
    from docker.errors import APIError
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    if isinstance(error, APIError):
        return bool(error.response is not None and error.response.status_code in (502, 503, 504))
    return isinstance(error, RequestException | HTTPError | OSError)


def is_missing(error: BaseException) -> bool:
    """Whether the daemon says that there is no such container, image or volume."""
    from docker.errors import NotFound

    return isinstance(error, NotFound)


def reason(error: BaseException) -> str:
    """One line that says what went wrong, without the client library's wrapping."""
    explanation = getattr(error, "explanation", None)
    text = str(explanation or error).strip() or type(error).__name__
    return text.splitlines()[-1][:400]
