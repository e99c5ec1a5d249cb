"""Daemons of several API versions on a socket of the test's own: the version is negotiated, the daemon is named."""

from __future__ import annotations

import gc
import hashlib
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


@pytest.mark.parametrize(
    "host", ["tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "tcp://[::1", "tcp://", "npipe:////./pipe/x", "fd://", " "]
)
def test_an_address_without_sense_is_named(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(PoolError, match=r"no Docker daemon answers at .*use isolation: process") as caught:
        daemon.connect(timeout_s=5.0)
    assert host in str(caught.value)


def test_a_daemon_that_talks_nonsense_is_none(speaks: Any) -> None:
    speaks("9.xy", "1.12")
    with pytest.raises(PoolError, match="no Docker daemon answers"):
        daemon.connect(timeout_s=5.0)


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write Docker's own configuration: the current context's name, and what its file holds."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def write(current: str, **files: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"currentContext": current}))
        for name, text in files.items():
            meta = tmp_path / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
            meta.parent.mkdir(parents=True)
            meta.write_text(text)

    return write


def context_at(name: str, host: str) -> str:
    endpoint = {"Host": host, "SkipTLSVerify": False}
    return json.dumps({"Name": name, "Metadata": {}, "Endpoints": {"docker": endpoint}})


def test_the_variable_chooses_the_context(speaks: Any, contexts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = speaks("1.47", "1.24")
    monkeypatch.delenv("DOCKER_HOST")
    contexts("gone", chosen=context_at("chosen", address))
    monkeypatch.setenv("DOCKER_CONTEXT", "chosen")
    client = daemon.connect(timeout_s=5.0)
    try:
        told = daemon.facts(client)
    finally:
        client.close()
    assert (told.context, told.address) == ("chosen", address)


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "is not there"), ("{", "cannot be read"), ('{"Name": "one"}', "cannot be read"),
     (context_at("one", "tcp://a:b"), "answers at tcp://a:b")],
)  # fmt: skip
def test_a_context_that_is_gone_or_damaged_is_said(contexts: Any, text: str | None, words: str) -> None:
    contexts("one", **({} if text is None else {"one": text}))
    with pytest.raises(PoolError, match=words):
        daemon.connect(timeout_s=5.0)
    assert daemon.answers() == ("answers" in words), "a look without a message does not fail"


def test_what_helps_is_named_where_no_daemon_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script starts a daemon at the usual place: of another one it would not help."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'no.sock'}")
    with pytest.raises(PoolError, match=r"\(fix: start one, or use isolation: process\)"):
        daemon.connect()
    monkeypatch.setattr(daemon, "_USUAL", (str(tmp_path / "no.sock"),))
    root = Path(daemon.__file__).parent.parent
    monkeypatch.chdir(root)
    with pytest.raises(PoolError, match=r"\(fix: as root: scripts/docker-daemon.sh, or isolation: process\)"):
        daemon.connect()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PoolError, match=rf"fix: as root: {root}/scripts/docker-daemon.sh"):
        daemon.connect()
    assert (root / "scripts" / "docker-daemon.sh").is_file()
    monkeypatch.setattr(daemon, "__file__", str(tmp_path / "site" / "orchestrator" / "daemon.py"))
    with pytest.raises(PoolError, match=r"\(fix: start one, or use isolation: process\)"):
        daemon.connect()


def test_a_daemon_that_this_user_may_not_talk_to_is_not_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    monkeypatch.setattr(daemon, "_refusal", lambda address: PermissionError(13, "Permission denied"))
    with pytest.raises(PoolError, match=r"this user may not talk to the Docker daemon at .* \(fix: .*-aG"):
        daemon.connect()
    assert not daemon.answers()
