"""Ray in a process and a session of its own, spoken to over two pipes: whatever happens to Ray happens there.

Ray puts its services into the process group of whoever starts it, takes that program's SIGTERM handler for itself, and
ends the program where its services have gone. An orchestrator that is interrupted has its work to put away, and needs
none of that: a signal to its group (Ctrl-C, `timeout`, a CI runner) must not reach Ray first.

The service ends when the orchestrator closes the pipe, which the system does for one that was killed. One line of JSON
goes each way per question.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import spawn
from moegate.errors import PoolError
from moegate.records import PoolSpec, from_json, to_json
from orchestrator.pools import ray
from orchestrator.pools.slots import Slot

__all__ = ["RayService", "Share"]

_START_S = 180.0
_ASK_S = 60.0
_END_S = 15.0
_LAST_WORDS = 300
_MOST_BYTES = 22  # of the path above Ray's folder: of the 107 of a socket's path, Ray and we add up to 85


class RayService:
    """A local Ray, or a connection to a cluster, for the pools of one run. Thread-safe."""

    def __init__(self, pools: Sequence[PoolSpec]) -> None:
        """Start it.

        Raises:
            PoolError: Ray is not installed, does not start, or does not offer the pools' slots; or no folder for it
                can be made.
        """
        self._mutex = threading.Lock()
        self._lost = False
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the service lives
            self._folder = _new_folder()
        except OSError as error:
            raise PoolError(f"there is no room for Ray's files: {error.strerror}") from None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        try:
            self.ask("start", _START_S, pools=[to_json(pool) for pool in pools])
        except BaseException:
            self.stop()
            raise

    def ask(self, what: str, timeout_s: float = _ASK_S, **more: Any) -> Any:
        """Put one question and return the answer.

        Raises:
            PoolError: what Ray said against it, or that Ray has ended, or does not answer.
        """
        with self._mutex:
            if self._lost:
                raise PoolError(self._end())
            self._lost = True  # until the answer is there: one that comes late would be taken for the next one's
            answer = self._answer({"ask": what, **more}, timeout_s)
            self._lost = False
        if "error" in answer:
            raise PoolError(answer["error"])
        return answer["is"]

    def stop(self) -> None:
        """End Ray: in order where it still answers, else at once. Nothing of it is left running. Safe to call twice."""
        with self._mutex:
            process, orderly = self._process, not self._lost
            if process.returncode is not None:
                return
            self._lost = True
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                if orderly:
                    _await_end(process.pid, _END_S)
            finally:
                spawn.end_session(process.pid)
                process.wait()
                self._said.close()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise PoolError(self._end()) from None
        source, got, deadline = self._process.stdout.fileno(), b"", time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(source, select.POLLIN)
        while not got.endswith(b"\n"):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise PoolError(f"Ray did not answer within {timeout_s:g} s ({question['ask']})")
            more = os.read(source, 1 << 16)
            if not more:
                raise PoolError(self._end())
            got += more
        answer: dict[str, Any] = json.loads(got)
        return answer

    def _end(self) -> str:
        """That Ray has ended, with its last words."""
        if self._said.closed:
            return "Ray has ended"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return "Ray has ended" + (f": {lines[-1][:_LAST_WORDS]}" if lines else "")


def _new_folder() -> str:
    """A folder for Ray: below the one for temporary files, or below /tmp where a socket cannot have such a path."""
    parent = tempfile.gettempdir()
    if not parent.isascii() or len(parent) > _MOST_BYTES:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes it safe
    return tempfile.mkdtemp(prefix="moegate-ray-", dir=parent)


def _await_end(pid: int, timeout_s: float) -> None:
    """Wait for a child's end and leave it unreaped, so that its number stays that of its session."""
    handle = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll(timeout_s * 1000)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Share:
    """The slots of one pool, as the service counts them."""

    service: RayService
    pool: str

    def take(self, slot: Slot) -> bool:
        """Reserve one unit of the pool's resource; False while there is none. Raises PoolError where Ray has ended."""
        return bool(self.service.ask("take", pool=self.pool, slot=slot.index))

    def give(self, slot: Slot) -> None:
        """Return it; a Ray that has ended holds nothing any more."""
        try:
            self.service.ask("give", pool=self.pool, slot=slot.index)
        except PoolError:
            return

    def close(self) -> None:
        """Return everything."""
        try:
            self.service.ask("close", pool=self.pool)
        except PoolError:
            return


def serve(folder: str) -> None:
    """Answer on standard output what is asked on standard input, until that ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    pools: dict[str, ray.RayAllocator] = {}
    try:
        for line in sys.stdin:
            question = json.loads(line)
            try:
                answer: dict[str, Any] = {"is": _of(question, pools, folder)}
            except PoolError as error:
                answer = {"error": str(error)}
            except Exception as error:  # Ray fails in as many ways as it has processes
                answer = {"error": f"Ray: {type(error).__name__}: {str(error)[:_LAST_WORDS]}"}
            answers.write(json.dumps(answer) + "\n")
    except BrokenPipeError:
        return
    finally:
        signal.alarm(int(_END_S))  # a Ray whose own services hang must not outlive the orchestrator
        ray.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _of(question: dict[str, Any], pools: dict[str, ray.RayAllocator], folder: str) -> bool:
    match question["ask"]:
        case "start":
            specs = [from_json(PoolSpec, pool) for pool in question["pools"]]
            ray.start(specs, Path(folder))
            pools.update({spec.name: ray.RayAllocator(spec) for spec in specs})
        case "take":
            return pools[question["pool"]].take(question["slot"])
        case "give":
            pools[question["pool"]].give(question["slot"])
        case "close":
            pools[question["pool"]].close()
    return True


if __name__ == "__main__":
    serve(sys.argv[1])
