"""Where a command's answer goes: with `--json` one document on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from moegate.text import plain

__all__ = ["Github", "annotate", "emit_json", "say", "table"]


Github = Annotated[bool, typer.Option("--github", help="Print GitHub annotations too: 10 errors, 10 warnings.")]
"""The option of every command whose answer can show beside the lines of a pull request."""


def emit_json(document: Any) -> None:
    """Print exactly one JSON document to standard output."""
    print(json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False))


def annotate(lines: Iterable[str]) -> None:
    """Print workflow commands, to standard error: GitHub reads both streams, and `--json` owns the other one."""
    for line in lines:
        say(line)


def say(text: str) -> None:
    """Print a line for a person to standard error."""
    print(text, file=sys.stderr)


def table(rows: list[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    """Columns, aligned; the last one is left ragged. What is not printable is written out: runs hold others' text."""
    lines = [tuple(map(plain, line)) for line in ([head] if head else []) + rows]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
