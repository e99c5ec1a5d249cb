"""A real server for a module's tests, and the command line as a person runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MODEL = Path("examples/models/tiny-moe").resolve()


def wait_for(what: Callable[[], object], seconds: float = 120.0) -> object:
    """Wait until `what` gives something true. The limit is for a host that is busy with other things."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing after {seconds} s")


def clean_env(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "MOEGATE"))}, **more}


@contextmanager
def running(tmp: Path, *options: str, **env: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server process; yields its URL when it is ready, and asserts a clean end."""
    address = tmp / "address"
    argv = [sys.executable, "-P", "-m", "serving.server", f"--model={MODEL}", f"--address-file={address}", *options]
    process = subprocess.Popen(argv, cwd=tmp, env=clean_env(**env))

    def ready() -> str | None:
        assert process.poll() is None, "the server ended"
        if not address.is_file():
            return None
        url = address.read_text().strip()
        try:
            with urllib.request.urlopen(url + "/health", timeout=30):
                return url
        except urllib.error.HTTPError as error:  # not ready: this is an open answer too
            error.close()
        except OSError:
            pass
        return None

    try:
        url = wait_for(ready)
        assert isinstance(url, str)
        yield url, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The URL of a server for the whole module, and its worker's process."""
    folder = tmp_path_factory.mktemp("server")
    with running(folder, "--slots=4", "--max-queue=6", "--configs=none") as (url, process):
        (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield url, int(worker)


@pytest.fixture
def server(served: tuple[str, int]) -> str:
    return served[0]


@pytest.fixture
def start() -> Callable:
    return running


@pytest.fixture
def until() -> Callable:
    return wait_for


@pytest.fixture
def serving(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `serving ...` to its end."""

    def call(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "serving", *argv]
        return subprocess.run(command, cwd=tmp_path, env=clean_env(**env), capture_output=True, text=True, timeout=280)

    return call
