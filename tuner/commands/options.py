"""What options and arguments of several commands are read by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from moegate.entry import ready_to_write

__all__ = ["PATH", "not_empty", "place"]


def not_empty(value: str | None) -> str | None:
    """An empty word is not the default: what was meant to be there, such as a variable, is missing."""
    if value is not None and not value.strip(" ,"):
        raise typer.BadParameter("is empty: name something, or leave the option out")
    return value


def place(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """As `ready_to_write`, for an option that may be left out."""
    return None if value is None else ready_to_write(value, param.opts[0])


def _path(text: str) -> Path:
    if not text.strip():  # pathlib takes it for the folder in which the command runs
        raise typer.BadParameter("is empty: name a path")
    return Path(text)


PATH: dict[str, Any] = {"parser": _path, "metavar": "<path>"}
"""Arguments of `typer.Option` and `typer.Argument` for paths."""
