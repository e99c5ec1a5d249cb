"""What changed between two readings of an engine's dispatch: rows moved, added, lost or under another condition."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moegate.dispatch.extract import Extraction, SourceFunction, SourceRow

Kind = Literal["moved", "added", "lost", "condition", "function-lost", "function-added"]


@dataclass(frozen=True)
class RowChange:
    """One difference. `file` and `line` are where to look: in the new tree, or in the old one for what is gone."""

    kind: Kind
    function: str
    file: str
    line: int
    message: str


def compare(base: Extraction, head: Extraction) -> tuple[RowChange, ...]:
    """Every difference between two trees of one engine, in the order of its watch table."""
    return tuple(_compare(base, head))


def _compare(base: Extraction, head: Extraction) -> Iterator[RowChange]:
    before = {(f.watched.file, f.name): f for f in base.functions}
    after = {(f.watched.file, f.name): f for f in head.functions}
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old is not None and new is not None:
            yield from _rows(old, new)
        elif old is not None:
            words = f"{old.name} is gone: nothing says any more how its choice is made"
            yield RowChange("function-lost", old.name, old.file, old.line, words)
        elif new is not None:
            yield RowChange(
                "function-added", new.name, new.file, new.line, f"{new.name} is new, with {len(new.rows)} rows"
            )


def _rows(old: SourceFunction, new: SourceFunction) -> Iterator[RowChange]:
    before, after = [_key(row) for row in old.rows], [_key(row) for row in new.rows]
    gone: list[SourceRow] = []
    come: list[SourceRow] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            gone += old.rows[a:b]
            come += new.rows[c:d]
    for row in list(come):
        match = next((other for other in gone if _key(other) == _key(row)), None)
        if match is not None:
            gone.remove(match)
            come.remove(row)
            words = f"{_say(row)} was row {match.index + 1} and is row {row.index + 1} now"
            yield RowChange("moved", new.name, new.file, row.line, words)
    for row in list(come):
        match = next((other for other in gone if other.target == row.target), None)
        if match is not None:
            gone.remove(match)
            come.remove(row)
            words = f"{row.target} is reached when {row.condition}; before, when {match.condition}"
            yield RowChange("condition", new.name, new.file, row.line, words)
    for row in come:
        yield RowChange("added", new.name, new.file, row.line, f"row {row.index + 1} is new: {_say(row)}")
    for row in gone:
        words = f"row {row.index + 1} is gone: {_say(row)}"
        yield RowChange("lost", new.name, new.file, new.line, words)


def _key(row: SourceRow) -> tuple[str, str]:
    return row.condition, row.target


def _say(row: SourceRow) -> str:
    return f"{row.condition} -> {row.target}"
