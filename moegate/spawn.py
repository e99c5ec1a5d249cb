"""Start a command as a fresh process: own environment, own process group, bounded logs, a hard deadline.

Children are executed anew and never forked from a process that has touched a device. A child dies with the process
that started it, and at its deadline its whole group is killed, so that nothing is left running.

Linux ties that death to the thread that started the child: when this thread ends, the child is killed, however much the
rest of the process still wants of it. So the rule: a thread starts a child only if it also waits for its end (`run`, or
`start` and `wait` in one function), or if it is the main thread. Other threads may come, use a child and go.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, TypedDict, Unpack

from moegate.errors import UsageError

__all__ = ["Child", "Finished", "child_env", "end_session", "run", "start"]

MAX_LOG_BYTES = 16 << 20
TRUNCATED = b"\n[log truncated by moegate: more than the limit was written]\n"
_PR_SET_PDEATHSIG = 1
_DRAIN_S = 2.0
_LIBC = ctypes.CDLL(None, use_errno=True)
# What a child may inherit. Everything else (tokens, proxies, CI variables) has to be named by the caller.
_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Finished:
    """How a child ended. `signal` is set where one killed it; `truncated` where a log went over its limit."""

    returncode: int
    signal: int | None
    timed_out: bool
    wall_s: float
    truncated: bool


def child_env(overlay: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a small, known environment: a few inherited names plus `overlay`.

    Raises:
        UsageError: a name or value of `overlay` cannot be an environment variable.
    """
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    for name, value in (overlay or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise UsageError(f"{name!r} cannot be an environment variable", field=name)
        env[name] = value
    env.setdefault("PATH", os.defpath)
    env["PYTHONUNBUFFERED"] = "1"
    return env


class Child:
    """A running child. Use `wait` to the end, or `stop` to end it early; both reap the whole process group."""

    def __init__(self, process: subprocess.Popen[bytes], deadline: float | None, pump: Pump) -> None:
        self.pid = process.pid
        self._process = process
        self._deadline = deadline
        self._pump = pump
        self._began = time.monotonic()
        self._handle = os.pidfd_open(process.pid)
        self.finished: Finished | None = None

    def poll(self) -> int | None:
        """Return the exit status if the child has ended (its group is then gone too), else None."""
        return self._end(False).returncode if self.finished or self._ended(0.0) else None

    def wait(self, tick: Callable[[], None] | None = None, tick_s: float = 0.5) -> Finished:
        """Wait for the end or the deadline; `tick` is called meanwhile and may raise to end the child."""
        timed_out = False
        try:
            while not timed_out:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                waits = [value for value in (left, tick_s if tick else None) if value is not None]
                if self._ended(max(0.0, min(waits)) if waits else None):
                    break
                timed_out = left is not None and self._deadline is not None and time.monotonic() >= self._deadline
                if tick:
                    tick()
        except BaseException:
            self._end(False)
            raise
        return self._end(timed_out)

    def stop(self, grace_s: float = 5.0) -> Finished:
        """Ask the group to end (SIGTERM), wait `grace_s` seconds, then kill it."""
        if self.finished:
            return self.finished
        self._signal(signal.SIGTERM)
        self._ended(grace_s)
        return self._end(False)

    def _ended(self, timeout_s: float | None) -> bool:
        """Wait for the end without reaping: until `_end` the dead child keeps its number, so no group is mistaken."""
        poller = select.poll()
        poller.register(self._handle, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _end(self, timed_out: bool) -> Finished:
        if self.finished:
            return self.finished
        # The group is killed even after a clean exit: a grandchild must not outlive the work it was part of.
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        os.close(self._handle)
        truncated = self._pump.join()
        self.finished = Finished(
            returncode=status,
            signal=-status if status < 0 else None,
            timed_out=timed_out,
            wall_s=time.monotonic() - self._began,
            truncated=truncated,
        )
        return self.finished


class Pump:
    """Copies a child's output pipes to files in one thread; what is over the limit is read and dropped."""

    def __init__(self, pairs: Sequence[tuple[IO[bytes], Path]], limit: int) -> None:
        self._limit = limit
        self._truncated = False
        self._selector = selectors.DefaultSelector()
        self._logs: list[_Log] = []
        for pipe, path in pairs:
            path.parent.mkdir(parents=True, exist_ok=True)
            sink = path.open("ab", buffering=0)
            log = _Log(pipe, sink, sink.tell())
            self._logs.append(log)
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, log)
        self._stop_at: float | None = None
        self._thread = Thread(target=self._work, name="moegate-log", daemon=True)
        self._thread.start()

    def join(self) -> bool:
        """Wait until the pipes are drained and return whether anything was dropped."""
        # A grandchild in a session of its own may hold a pipe, and write, for ever: drain what is there, then stop.
        self._stop_at = time.monotonic() + _DRAIN_S
        self._thread.join()
        return self._truncated

    def _work(self) -> None:
        while self._selector.get_map():
            ready = self._selector.select(timeout=0.05)
            if self._stop_at is not None and (not ready or time.monotonic() > self._stop_at):
                break
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    self._selector.unregister(key.fileobj)
                    continue
                self._store(key.data, chunk)
        self._selector.close()
        for log in self._logs:
            log.pipe.close()
            log.sink.close()

    def _store(self, log: _Log, chunk: bytes) -> None:
        room = max(self._limit - log.size, 0)
        log.size += len(chunk)
        try:
            if room:
                log.sink.write(chunk[:room])
            if len(chunk) > room and not log.cut:
                log.cut = self._truncated = True
                log.sink.write(TRUNCATED)
        except OSError:  # a full disk must stop neither the child nor the reader
            log.cut = self._truncated = True
            log.size = self._limit


@dataclass
class _Log:
    """One log file and how much was written to its pipe."""

    pipe: IO[bytes]
    sink: IO[bytes]
    size: int
    cut: bool = False


def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: Path | None = None,
    stderr: Path | None = None,
    timeout_s: float | None = None,
    cpus: Sequence[int] | None = None,
    max_log_bytes: int = MAX_LOG_BYTES,
) -> Child:
    """Start `argv` (never through a shell) and return it running.

    Args:
        argv: program and arguments.
        cwd: working directory, such as the attempt's folder.
        env: the whole environment; see `child_env`.
        stdout: file to append standard output to; None discards it.
        stderr: the same for standard error.
        timeout_s: seconds until the group is killed (enforced by `wait`).
        cpus: CPU numbers that the child may use.
        max_log_bytes: bytes kept of each log.

    Raises:
        OSError: the program cannot be executed.
    """
    parent = os.getpid()

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)
        if cpus:
            os.sched_setaffinity(0, cpus)

    process = subprocess.Popen(
        list(argv),
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout else subprocess.DEVNULL,
        stderr=subprocess.PIPE if stderr else subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,
    )
    pairs = [(pipe, path) for pipe, path in ((process.stdout, stdout), (process.stderr, stderr)) if pipe and path]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    return Child(process, deadline, Pump(pairs, max_log_bytes))


class StartOptions(TypedDict, total=False):
    """What may be added to a start; see `start`."""

    stdout: Path | None
    stderr: Path | None
    timeout_s: float | None
    cpus: Sequence[int] | None
    max_log_bytes: int


def run(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], **options: Unpack[StartOptions]) -> Finished:
    """Start a command and wait for its end; see `start`."""
    return start(argv, cwd=cwd, env=env, **options).wait()


def end_session(session: int) -> None:
    """Kill every process of a session, whatever group it is in; its leader must not have been waited for yet."""
    for _ in range(50):  # again until none is found, because they may be forking
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _lives_in(pid, session)]  # noqa: PTH208
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _lives_in(pid: int, session: int) -> bool:
    """Whether a process belongs to a session and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        state, _, _, of = text.rpartition(")")[2].split()[:4]  # a name may hold anything, brackets too
    except (OSError, ValueError):
        return False
    return int(of) == session and state not in "ZX"
