"""Daemons of several API versions on a socket of the test's own: the version is negotiated, the daemon is named."""

from __future__ import annotations

import gc
import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from moegate.errors import PoolError
from orchestrator import daemon

INFO = {
    "ID": "abc",
    "ServerVersion": "29.1",
    "Driver": "overlay2",
    "CgroupVersion": "2",
    "CgroupDriver": "systemd",
    "DockerRootDir": "/var/lib/docker",
    "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}],
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api, least = "1.41", "1.12"

    def log_message(self, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "test"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        asked = path.split("/")[1].removeprefix("v") if path.startswith("/v") and path != "/version" else None
        answers: dict[str, Any] = {
            "version": {"ApiVersion": self.api, "MinAPIVersion": self.least},
            "_ping": "OK",
            "info": INFO,
        }
        number = [int(part) for part in (asked or self.api).split(".")]
        refused = not [int(p) for p in self.least.split(".")] <= number <= [int(p) for p in self.api.split(".")]
        body = {"message": f"client version {asked} is not supported"} if refused else answers[path.rsplit("/", 1)[1]]
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(400 if refused else 200)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a daemon of an API version; return where it listens."""
    started: list[Server] = []

    def start(api: str, least: str) -> str:
        handler = type("Speaking", (Handler,), {"api": api, "least": least})
        path = tmp_path / f"{len(started)}.sock"
        server = Server(str(path), handler)
        started.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        return f"unix://{path}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("api", "least"), [("1.41", "1.12"), ("1.47", "1.24"), ("1.52", "1.44")])
def test_the_api_version_is_negotiated_and_the_daemon_named(speaks: Any, api: str, least: str) -> None:
    address = speaks(api, least)
    client = daemon.connect(timeout_s=5.0)
    try:
        told = daemon.facts(client)
    finally:
        client.close()
    assert told.api == api
    assert told.address == address
    assert told.record()["docker.context"] == "DOCKER_HOST"
    assert (told.id, told.root, told.cdi) == ("abc", "/var/lib/docker", {"nvidia.com/gpu=0"})
    assert told.record()["docker.id"] == "abc"


def test_a_socket_without_a_daemon_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(PoolError, match=r"none\.sock .*use isolation: process"):
        daemon.connect()


def test_a_daemon_that_goes_away_leaves_no_socket_open(speaks: Any) -> None:
    address = speaks("1.47", "1.24")
    client = daemon.connect(timeout_s=5.0)
    client.api.close()  # the pooled connection, so that the next request makes a new one
    Path(address.removeprefix("unix://")).unlink()
    # A leaked socket warns when it is collected, and a warning is an error here.
    with pytest.raises(Exception, match="No such file"):
        client.ping()
    client.close()
    del client
    gc.collect()
