"""Reading config files the way the engines do: Python's own JSON, `int()` on the keys, no checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from moegate.configs.engines.raised import EngineRaises
from moegate.configs.values import Value

_FIX = "run `orchestrator check` on this tree"


def read_like_engine(engine: str, path: Path, *, drop: tuple[str, ...] = ()) -> dict[int, dict[str, Value]]:
    """One file as the engine's lookup returns it.

    Args:
        engine: named in the error. path: a path that exists. drop: top-level keys the engine removes first.

    Raises:
        EngineRaises: where the engine's own code would raise.
    """
    try:
        with path.open() as stream:
            data: Any = json.load(stream)
        for name in drop:
            data.pop(name, None)
        return cast("dict[int, dict[str, Value]]", {int(key): value for key, value in data.items()})
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise EngineRaises(engine, type(error).__name__, f"{error}"[:200], file=path, fix=_FIX) from None
