"""Words of the command line, before a command takes them: what is empty is no choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer

from moegate.entry import ready_to_write
from moegate.errors import UsageError

__all__ = ["PATH", "ensure_companions", "given", "to_write"]

_T = TypeVar("_T")


def given(param: typer.CallbackParam, value: _T) -> _T:
    """An empty word is not the default: what was meant to be there, such as a variable, is missing.

    Raises:
        UsageError: naming the option; of an option that is given several times, every word counts.
    """
    for word in value if isinstance(value, list) else [value]:
        if isinstance(word, str) and not word.strip(" ,"):
            raise UsageError("is empty", field=param.opts[0], fix="name something, or leave the option out")
    return value


def ensure_companions(context: typer.Context, companions: Mapping[str, str]) -> None:
    """Refuse an option that would be ignored: whoever gives it believes that it counts.

    Args:
        context: the command's. companions: option -> the one without which it says nothing, by their parameters' names.

    Raises:
        UsageError: naming both.
    """
    spelled = {param.name: param.opts[0] for param in context.command.params}
    for name, needed in companions.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and not context.params[needed]:
            raise UsageError(
                f"counts only with {spelled[needed]}", field=spelled[name],
                fix=f"give {spelled[needed]} too, or leave {spelled[name]} out",
            )  # fmt: skip


def to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """As `ready_to_write`, for an option that may be left out."""
    return None if value is None else ready_to_write(value, param.opts[0])


def _path(text: str) -> Path:
    if not text.strip():  # pathlib takes it for the folder in which the command runs
        raise typer.BadParameter("is empty: name a path")
    return Path(text)


PATH: dict[str, Any] = {"parser": _path}
"""Arguments of `typer.Option` for paths."""
