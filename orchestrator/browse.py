"""An index of runs on loopback: read from the run directories at every request, never written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from moegate import records
from moegate.errors import InfraError, UsageError
from moegate.locks import holder_of
from moegate.paths import is_file, is_folder
from moegate.records import GateResult, Plan, RunCard

__all__ = ["FILES", "read_card", "scan", "server"]

FILES: dict[str, str] = {
    "report.html": "text/html; charset=utf-8",
    "junit.xml": "text/xml; charset=utf-8",
    "results.sarif": "application/json",
    "summary.md": "text/plain; charset=utf-8",
    "gate.json": "application/json",
    "comparison.json": "application/json",
    "plan.json": "application/json",
}
"""What is served of a run, and as what; nothing else is."""

_MOST_RUNS = 2000
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})

Render = Callable[[Sequence[RunCard]], str]


def scan(root: Path) -> tuple[RunCard, ...]:
    """Return the runs in a folder of runs (or the one run that the folder is), newest by name first, at most 2,000.

    Raises:
        UsageError: the folder is not there.
    """
    if not is_folder(root):
        raise UsageError(
            "is not a folder", file=root, fix="name the folder that holds the run directories, such as runs/"
        )
    if is_file(root / "plan.json"):
        return (read_card(root, ""),)
    with os.scandir(root) as entries:
        names = sorted((e.name for e in entries if e.is_dir(follow_symlinks=False)), reverse=True)
    runs = [name for name in names if is_file(root / name / "plan.json")]
    return tuple(read_card(root / name, name) for name in runs[:_MOST_RUNS])


def read_card(path: Path, folder: str) -> RunCard:
    """Return what an index says of one run directory; damage becomes `problem`, never an exception."""
    files = tuple(name for name in FILES if is_file(path / name))
    try:
        plan = records.read(Plan, path / "plan.json")
        gate = records.read(GateResult, path / "gate.json") if "gate.json" in files else None
    except (UsageError, OSError) as error:
        return RunCard(folder, folder or path.name, files=files, exit=3, problem=f"cannot be read: {error}")
    return RunCard(
        folder=folder,
        name=plan.name,
        matrix=plan.matrix,
        started=plan.created,
        cells=len(plan.cells),
        exit=gate.exit if gate is not None else None,
        sentence=gate.sentence if gate is not None else "",
        counts=dict(gate.counts) if gate is not None else {},
        files=files,
        running=holder_of(path / "lock") is not None,
    )


def server(root: Path, port: int, render: Render) -> ThreadingHTTPServer:
    """Return a server of `root` bound to loopback; `render` makes the index. Port 0 takes a free one.

    Raises:
        InfraError: the port cannot be had.
    """

    class Handler(_Handler):
        folder = root
        index = staticmethod(render)

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise InfraError(f"cannot listen on 127.0.0.1:{port}: {error}") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the index and for the listed files of runs that the index shows."""

    folder: Path
    index: Render
    protocol_version = "HTTP/1.1"
    server_version = "moegate"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer a HEAD."""
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet: a request is not news."""

    def _answer(self, *, body: bool) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in _HOSTS:  # a name that a foreign page bound to this address
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only on this machine, by its loopback name\n", body=body)
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if parts in ([""], ["index.html"]):
            try:
                cards = scan(self.folder)
            except (UsageError, OSError) as error:  # the folder has gone, or may not be read any more
                self._send(
                    HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode("utf-8", "replace"), body=body
                )
                return
            page = self.index(cards).encode("utf-8", "replace")
            self._send(HTTPStatus.OK, FILES["report.html"], page, body=body)
            return
        found = self._file(parts)
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not here\n", body=body)
            return
        self._send(HTTPStatus.OK, FILES[parts[-1]], found, body=body)

    def _file(self, parts: list[str]) -> bytes | None:
        """Return the content of `<run>/<file>` where both are on their lists and no link leads out of the folder."""
        if not 1 <= len(parts) <= 2 or parts[-1] not in FILES:
            return None
        if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
            return None
        folder = self.folder.joinpath(*parts[:-1])
        if not is_file(folder / "plan.json") or folder.is_symlink():
            return None
        try:
            handle = os.open(folder / parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(handle, "rb") as stream:
            return stream.read() if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else None

    def _send(self, status: HTTPStatus, kind: str, content: bytes, *, body: bool) -> None:
        self.send_response(status)
        for name, words in {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}.items():
            self.send_header(name, words)
        self.end_headers()
        if body:
            self.wfile.write(content)
