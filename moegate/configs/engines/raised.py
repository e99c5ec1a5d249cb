"""The engine's own failure, as an answer."""

from __future__ import annotations

from pathlib import Path

from moegate.errors import UsageError


class EngineRaises(UsageError):
    """The engine's lookup would raise here. `exception` is the name of what it raises."""

    def __init__(self, engine: str, exception: str, message: str, *, file: str | Path, fix: str) -> None:
        self.engine, self.exception = engine, exception
        super().__init__(f"{engine} raises {exception} here: {message}", file=file, fix=fix)
