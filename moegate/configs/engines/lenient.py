"""Reading config files the way the engines do: Python's own JSON, `int()` on the keys, no checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from moegate import canonical
from moegate.configs.engines.raised import EngineRaises
from moegate.configs.values import Value
from moegate.errors import UsageError

_FIX = "run `orchestrator check` on this tree"


def read_like_engine(engine: str, path: Path, *, drop: tuple[str, ...] = ()) -> dict[int, dict[str, Value]]:
    """One file as the engine's lookup returns it.

    Args:
        engine: named in the error. path: a path that exists. drop: top-level keys the engine removes first.

    Raises:
        EngineRaises: where the engine's own code would raise.
        UsageError: where it would wait.
    """
    _ensure_no_wait(engine, path)
    try:
        with path.open() as stream:
            data: Any = json.load(stream)
        for name in drop:
            data.pop(name, None)
        return cast("dict[int, dict[str, Value]]", {int(key): value for key, value in data.items()})
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EngineRaises(engine, type(error).__name__, f"{error}"[:200], file=path, fix=_FIX) from None


def _ensure_no_wait(engine: str, path: Path) -> None:
    """A pipe, or a file of the kernel's that has no size, is waited for by the engine; nobody here must."""
    try:
        if not path.is_dir() and path.stat().st_size == 0:
            canonical.read_file(path)
    except OSError:
        return  # the engine's own opening says what is wrong
    except UsageError as error:
        raise UsageError(f"{error.message}; {engine} opens it all the same", file=path, fix=_FIX) from None
