"""The child's side: one request at a time, one answer line for each, nothing else on standard output.

Requests and answers are JSON objects. An exception of a config is an answer with an error class; what kills the
process is attributed by the parent to the request it was waiting for. Imports torch, triton, numpy and our own
torch-side modules, nothing more: the process runs inside an engine's own environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any

__all__ = ["classify", "serve"]

_PR_SET_PDEATHSIG = 1
# Words of errors after which the device context of this process is of no use any more.
_POISON = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "device-side assert",
    "device lost",
)
_OVER_SHARED = ("shared memory", "out of resource: shared")
_OUT_OF_MEMORY = ("out of memory", "out_of_memory", "cannot allocate", "storage size calculation overflowed")


def classify(error: BaseException) -> tuple[str, bool]:
    """Error class of an exception, and whether the process must be replaced."""
    text = f"{type(error).__name__}: {error}".lower()
    if any(words in text for words in _POISON):
        return "illegal-access", True
    if type(error).__name__ == "OverShared":
        return "over-shared", False
    if type(error).__name__ == "OutOfResources":
        return ("over-shared" if any(words in text for words in _OVER_SHARED) else "over-threads"), False
    if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
        return "out-of-memory", False
    if type(error).__name__ in ("CompilationError", "CompileTimeAssertionFailure", "PTXASError"):
        return "compile-failed", False
    return "exception", False


def serve() -> None:
    """Answer requests until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an outcome here, and its dump would take seconds
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not between our answers
    session: Any = None
    for request in _requests(sys.stdin):
        try:
            if session is None:
                from tuner.child.session import Session

                session = Session()
            answer = _handler(session, request["do"])(**request.get("args", {}))
        except Exception as error:
            kind, poisoned = classify(error)
            traceback.print_exc(file=sys.stderr)
            answer = {"error": kind, "reason": f"{type(error).__name__}: {error}"[:500], "poisoned": poisoned}
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def _handler(session: Any, verb: str) -> Callable[..., dict[str, Any]]:
    handler: Callable[..., dict[str, Any]] = getattr(session, f"do_{verb}")
    return handler


def _requests(stream: IO[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        if line.strip():
            yield json.loads(line)
