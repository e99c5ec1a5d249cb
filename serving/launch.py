"""Start a server, wait until it is ready, run a command against it, end it: the whole life of one launch.

The server is executed anew in a process group of its own, never forked from a process that holds a device. However
this process ends, the server ends with it: in order on SIGTERM or SIGINT, by the kernel on SIGKILL.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from moegate import canonical, spawn
from moegate.errors import InfraError, UsageError
from moegate.exits import Exit
from moegate.paths import exists, write_atomic
from serving import apikey, engines
from serving.engines import Engine, Launched, Spec
from serving.engines.protocol import is_up
from serving.lifeline import die_with_parent
from serving.ports import free_port
from serving.workdir import owned, work_folder

__all__ = ["launch", "launched_from"]

_POLL_S = 0.02
_GRACE_S = 10.0
_LOG_BYTES = 256 << 20
_TAIL = 4000
LAUNCH_FILE = "MOEGATE_LAUNCH"
BASE_URL = "MOEGATE_BASE_URL"
_CLIENTS_KEY = "OPENAI_API_KEY"  # what the engines' own load clients send


class _Ended(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def launch(
    engine: Engine,
    spec: Spec,
    command: Sequence[str] = (),
    *,
    log: Path | None = None,
    ready_s: float | None = None,
    announce: Path | None = None,
) -> int:
    """Run one launch and return its exit code.

    Args:
        engine: whose server.
        spec: what is served.
        command: run when the server is ready, with MOEGATE_BASE_URL, MOEGATE_API_KEY and MOEGATE_LAUNCH set; without
            one the server runs until SIGTERM or SIGINT.
        log: keeps the server's output; without it the end of it is printed where something went wrong.
        announce: written once the server is ready, for `serving bench --launch`, and gone with it: keeps a server up
            for many loads. What an earlier launch left there is removed first.
        ready_s: seconds until a server that is not ready has failed; None takes the engine's.

    Raises:
        UsageError: the server refused what it was asked for (its own exit code was 2), or `announce` tells of a launch
            that still runs.
        InfraError: it did not become ready, or ended by itself.
    """
    with ExitStack() as stack:
        if announce is not None:
            _ensure_free(announce)
        work = stack.enter_context(work_folder())
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, _raise_ended))
        try:
            return _run(engine, spec, command, log or work / "server.log", ready_s or engine.ready_s, work, announce)
        except _Ended as ended:
            return int(Exit.TERMINATED if ended.number == signal.SIGTERM else Exit.INTERRUPTED)


def launched_from(base_url: str | None, announced: Path | None = None) -> tuple[Engine, Launched]:
    """The engine and the launch that a command was started under or that was announced, or a server of ours."""
    file = announced or (Path(os.environ[LAUNCH_FILE]) if LAUNCH_FILE in os.environ else None)
    if announced is not None and not exists(announced):
        raise UsageError("no server has announced itself there, or it has ended", file=announced, field="--launch",
                         fix=f"start one: serving launch --model DIR --announce {announced}")  # fmt: skip
    told: Any = None if file is None else canonical.load_json(file)
    try:
        return _launched(base_url or (os.environ.get(BASE_URL) if file is None else told["base_url"]), told)
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"is not what `serving launch --announce` writes: {error}", file=file) from None


def _launched(url: str | None, told: Any) -> tuple[Engine, Launched]:
    if url is None:
        fix = f"--launch FILE of `serving launch --announce`, --base-url URL, or set {BASE_URL}"
        raise UsageError("no server is named", field="base-url", fix=fix)
    if told is None or told["base_url"] != url:  # somebody else's server: only ours tells everything by itself
        return engines.get("moegate"), Launched(Spec(Path()), url, Path(os.devnull), Path())
    os.environ[apikey.VARIABLE] = told["api_key"]
    paths = {name: told["spec"][name] and Path(told["spec"][name]) for name in ("model", "configs", "record_routing")}
    return engines.get(told["engine"]), Launched(
        Spec(**{**told["spec"], **paths}), url, Path(told["log"]), Path(told["work"])
    )


def _ensure_free(announce: Path) -> None:
    """Take away what an earlier launch announced, so that nobody takes its server for the one that is coming."""
    try:
        told = canonical.load_json(announce)
        url, runs = str(told["base_url"]), owned(Path(told["work"]))
    except (UsageError, TypeError, KeyError, ValueError):  # not there, or none of ours
        return
    if runs:
        raise UsageError(
            f"tells of a launch that still runs, at {url}", file=announce, field="--announce",
            fix="end that one first, or name another file",
        )  # fmt: skip
    announce.unlink(missing_ok=True)


def _raise_ended(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


def _run(
    engine: Engine, spec: Spec, command: Sequence[str], log: Path, ready_s: float, work: Path, announce: Path | None
) -> int:
    port = spec.port or free_port()
    shared = announce is not None or apikey.VARIABLE in os.environ
    key = apikey.ensure()
    recipe = engine.command(spec, work, port)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    child = spawn.start(recipe.argv, cwd=work, env={**os.environ, **_import_path(), **recipe.env}, stdout=log,
                        stderr=log, max_log_bytes=_LOG_BYTES)  # fmt: skip
    ready = False
    told = ""
    try:
        base_url = _wait_ready(engine, child, work, port, log, ready_s)
        ready = True
        file = announce or work / "launch.json"
        told = _told(engine, Launched(spec, base_url, log, work), key)
        _write_private(file, told)
        if not command:
            return _follow(child, base_url, log, shared=shared)
        where = {BASE_URL: base_url, LAUNCH_FILE: str(file), _CLIENTS_KEY: key}
        return _client(child, command, {**os.environ, **where}, base_url, log)
    finally:
        alive = child.poll() is None
        child.stop(_GRACE_S)
        if announce is not None and told and _holds(announce, told):
            announce.unlink(missing_ok=True)
        if spec.record_routing is not None and ready and alive:
            _say_unrecorded(spec.record_routing)


def _holds(file: Path, text: str) -> bool:
    """Whether a file still is what was written; what lies there now may be anything."""
    try:
        return canonical.read_text(file) == text
    except UsageError:
        return False


def _import_path() -> dict[str, str]:
    """PYTHONPATH with its relative folders spelled out: the server runs in a folder of its own."""
    told = os.environ.get("PYTHONPATH")
    return {} if not told else {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, told.split(os.pathsep)))}


def _say_unrecorded(folder: Path) -> None:
    """Say it where a launch that was to keep expert choices kept none: who reads them would find out much later."""
    if not any(folder.glob("*.npy")):
        print(f"serving: no expert choices were kept in {folder}: no prefill was long enough (fix: longer prompts, or "
              "--engine-arg=--record-min-tokens=N)", file=sys.stderr, flush=True)  # fmt: skip


def _wait_ready(engine: Engine, child: spawn.Child, work: Path, port: int, log: Path, ready_s: float) -> str:
    deadline = time.monotonic() + ready_s
    pause = _POLL_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise _missing(engine, log) or _server_ended(child, log)
        url = engine.base_url(work, port)
        if url is not None and is_up(url):
            return url
        time.sleep(pause)
        pause = min(pause * 1.05, 0.5)
    raise InfraError(f"the server was not ready after {ready_s:g} s; its log ends:\n{_tail(log)}")


def _missing(engine: Engine, log: Path) -> InfraError | None:
    """What to do about a server that ended because its package is not there; None where it ended otherwise."""
    if f"No module named '{engine.name}'" not in _tail(log):
        return None
    return InfraError(
        f"{engine.name} is not installed for {sys.executable} (fix: install {engine.name} into that environment, or "
        f"moegate into {engine.name}'s, as the targets `{engine.name}` in dockerfiles/ do; or take --engine moegate)"
    )


def _server_ended(child: spawn.Child, log: Path) -> UsageError | InfraError:
    code = child.poll()
    tail = _tail(log)
    if code == Exit.USAGE:
        last = tail.strip().splitlines()[-1:] or ["the server refused its settings"]
        return UsageError(last[0].removeprefix("serving.server: "))
    return InfraError(f"the server ended with {code}; its log ends:\n{tail}")


def _write_private(file: Path, text: str) -> None:
    """Write a file that no other user reads."""
    before = os.umask(0o077)
    try:
        write_atomic(file, text)
    finally:
        os.umask(before)


def _told(engine: Engine, launched: Launched, key: str) -> str:
    """What a load client has to know of a launch, as JSON."""
    spec: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else value for name, value in asdict(launched.spec).items()
    }
    return json.dumps({"engine": engine.name, "base_url": launched.base_url, "spec": spec, "log": str(launched.log),
                       "work": str(launched.work), "api_key": key}, indent=1) + "\n"  # fmt: skip


def _client(child: spawn.Child, command: Sequence[str], env: dict[str, str], base_url: str, log: Path) -> int:
    """Run the command beside the server; it inherits our output and dies with us."""
    argv = [sys.executable, "-P", "-m", *command] if command[0] == "serving" else list(command)
    try:
        process = subprocess.Popen(argv, env=env, start_new_session=True,
                                   preexec_fn=functools.partial(die_with_parent, os.getpid()))  # fmt: skip
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}", field="COMMAND") from None
    try:
        while True:
            try:
                code = process.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                if child.poll() is not None:
                    raise _server_ended(child, log) from None
        if code != 0 and not is_up(base_url):
            _await_end(child)
        if child.poll() is not None:
            raise _server_ended(child, log)
        return code if code >= 0 else 128 - code
    finally:
        _end_group(process)


def _await_end(child: spawn.Child) -> None:
    """Give a server that answers no more the time to end: its clients see it go before it has gone."""
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number, grace in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _follow(child: spawn.Child, base_url: str, log: Path, *, shared: bool) -> int:
    """Serve until a signal comes, with the server's log on standard error; `shared`: somebody else has its key."""
    print(base_url, flush=True)
    if not shared:
        print(f"serving: nobody else has this server's key: start it with --announce FILE, or set {apikey.VARIABLE}",
              file=sys.stderr, flush=True)  # fmt: skip
    with log.open(encoding="utf-8", errors="replace") as stream:
        while child.poll() is None:
            _copy(stream)
            time.sleep(0.2)
        _copy(stream)
    raise _server_ended(child, log)


def _copy(stream: TextIO) -> None:
    text = stream.read()
    if text:
        sys.stderr.write(text)
        sys.stderr.flush()


def _tail(log: Path) -> str:
    return log.read_bytes()[-_TAIL:].decode(errors="replace") if log.is_file() else ""
