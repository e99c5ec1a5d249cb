"""Where a command's answer goes: with `--json` one document on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["emit_json", "plain", "say", "table"]


def emit_json(document: Any) -> None:
    """Print exactly one JSON document to standard output."""
    print(json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False))


def plain(text: str) -> str:
    """One line without control characters: what logs and branch names put into a message stays inert on a terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def say(text: str) -> None:
    """Print a line for a person to standard error."""
    print(text, file=sys.stderr)


def table(rows: list[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    """Columns, aligned; the last one is left ragged."""
    lines = [*([head] if head else []), *rows]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
