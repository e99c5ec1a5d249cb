"""The parent's side of a child: start it, ask it, give it a deadline, kill its whole group, say why it is gone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moegate import spawn
from moegate.errors import InfraError

__all__ = ["ChildSpec", "Worker", "WorkerLost", "code_roots"]

# Families of variables that choose a device or change generated code: a child must see the ones its parent was given.
_PASSED = ("TRITON_", "CUDA_", "HIP_", "ROCR_", "ROCM_", "ZE_", "ONEAPI_", "SYCL_", "IGC_", "NEO", "LLVM_", "PYTORCH_",
           "SGLANG_", "VLLM_", "DISABLE_LLVM_OPT", "NVIDIA_")  # fmt: skip
# Those of them that name a place, which a child in another folder would look for in vain; and those that may instead
# name a command of the PATH.
_PLACES = ("_DIR", "_HOME", "_KERNEL")
_PROGRAMS = ("_PATH",)
_PACKAGES = ("moegate", "tuner", "xkernels")
_GRACE_S = 2.0


class WorkerLost(Exception):
    """A child ended, or was ended, without answering. Caught where the request is known, and turned into an outcome."""

    def __init__(self, kind: Literal["timeout", "crashed"], reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(reason)


@dataclass(frozen=True)
class ChildSpec:
    """How children are started: interpreter, environment, folder for logs and caches."""

    folder: Path
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The whole environment of a child."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        env = spawn.child_env({name: _from_here(name, value) for name, value in {**passed, **self.env}.items()})
        env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        # Many compilers side by side, each with a thread per core, mostly wait for each other. All children have it,
        # because it may be part of the compiler's cache key.
        env.setdefault("MLIR_DISABLE_MULTITHREADING", "1")
        extra = env.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(code_roots(self.folder)), *([extra] if extra else [])])
        return env


def _from_here(name: str, value: str) -> str:
    """A variable's value, absolute where it is a relative path of this process's folder."""
    place = name.endswith(_PLACES) or (name.endswith(_PROGRAMS) and os.sep in value)
    return str(Path(value).absolute()) if place and value and os.pathsep not in value else value


def code_roots(folder: Path) -> Path:
    """A folder with links to our three torch-side packages and nothing else, for a child's path.

    A foreign interpreter does not have them installed, and the checkout's root would also expose `kernels`, which is
    another project's package.
    """
    import importlib.util

    links = folder / "packages"
    links.mkdir(parents=True, exist_ok=True)
    for name in _PACKAGES:
        found = importlib.util.find_spec(name)
        link = links / name
        if found is None or not found.submodule_search_locations:
            raise InfraError(f"package {name} is not importable")
        target = Path(next(iter(found.submodule_search_locations))).resolve()
        if not link.is_symlink() or link.resolve() != target:
            # Several threads start children at once: make the link aside and rename it into place.
            aside = links / f".{name}.{os.getpid()}.{threading.get_ident()}"
            aside.symlink_to(target)
            aside.replace(link)
    return links


class Worker:
    """One child process, started at the first question and again after every loss."""

    def __init__(self, spec: ChildSpec, name: str, before: Sequence[tuple[str, dict[str, Any]]] = ()) -> None:
        self.spec, self.name = spec, name
        self.starts = 0
        self._before = before
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._number = 0
        self._primed = False

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return None if self._process is None else self._process.pid

    def ask(self, verb: str, timeout_s: float, /, **args: Any) -> dict[str, Any]:
        """Put one question and wait for its answer.

        Raises:
            WorkerLost: the child did not answer in time (it was killed) or died.
        """
        self.start()
        return self._ask(verb, timeout_s, args)

    def start(self, timeout_s: float = 180.0) -> None:
        """Start the child where none runs, and put the questions that every new child is to answer first."""
        if self._process is not None and self._primed:
            return
        self.prime(timeout_s)

    def spawn(self) -> None:
        """Start the process where none runs, and ask it nothing yet.

        A child dies with the thread that started it, so a thread that comes to its end must not be the one.
        """
        if self._process is None:
            self._spawn()

    def prime(self, timeout_s: float) -> None:
        """Put those first questions to the child that runs (an adopted one was not asked them), or to a new one."""
        self.spawn()
        self._primed = True
        for verb, args in self._before:
            answer = self._ask(verb, timeout_s, args)
            if "error" in answer:
                self.stop()
                raise InfraError(f"{self.name}: {verb} failed: {answer['reason']} (log: {self._log()})")

    def adopt(self, other: Worker) -> None:
        """Take over the running child of another worker, which then has none."""
        self.stop()
        self._process, other._process = other._process, None
        self._buffer, self._number, self.starts = other._buffer, other._number, other.starts

    def stop(self) -> None:
        """End the child and everything in its group."""
        process, self._process = self._process, None
        self._buffer, self._primed = b"", False
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(_GRACE_S)
        except (subprocess.TimeoutExpired, OSError):
            pass
        _kill_group(process.pid)
        process.wait()
        process.stdout.close()

    def interrupt(self) -> None:
        """End the child's group from another thread: whoever waits for its answer learns that it is lost."""
        pid = self.pid
        if pid is not None:
            _kill_group(pid)

    def kill(self) -> None:
        """End the child's group at once."""
        if self._process is not None:
            _kill_group(self._process.pid)
        self.stop()

    def _log(self) -> Path:
        return self.spec.folder / f"{self.name}.log"

    def _spawn(self) -> None:
        self.spec.folder.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with self._log().open("ab") as log:
            self._process = subprocess.Popen(
                [self.spec.python, "-P", "-m", "tuner.child"],
                cwd=self.spec.folder,
                env=self.spec.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _ask(self, verb: str, timeout_s: float, args: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._number += 1
        try:
            process.stdin.write((json.dumps({"id": self._number, "do": verb, "args": args}) + "\n").encode())
            process.stdin.flush()
            line = self._line(process, time.monotonic() + timeout_s)
        except BrokenPipeError:
            line = None
        except BaseException:
            self.kill()
            raise
        if line is None:
            raise self._lost(process, timeout_s)
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("id") != self._number:
            self.kill()
            raise WorkerLost("crashed", "answered another question")
        if answer.pop("poisoned", False):
            self.kill()
        return answer

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """One line of the child's answers; None at its end or at the deadline."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _lost(self, process: subprocess.Popen[bytes], timeout_s: float) -> WorkerLost:
        try:
            status: int | None = process.wait(0.5)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        if status is None:
            return WorkerLost("timeout", f"no answer within {timeout_s:g} s")
        if status < 0:
            return WorkerLost("crashed", f"killed by {signal.Signals(-status).name}")
        return WorkerLost("crashed", f"exited with status {status}")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
