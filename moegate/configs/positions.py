"""Lines of things in JSON text, found only when there is something to say about them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_MAX_TOKENS = 2_000_000


class Positions:
    """Line numbers of the keys of one JSON text, by their path of keys from the root.

    `lines` maps a path to the line of its key, the last one where keys repeat; `duplicates` lists repeated paths with
    the line of the repetition. Text that is not JSON gives what could be read up to the error.
    """

    def __init__(self, text: str) -> None:
        self.lines: dict[tuple[str, ...], int] = {(): 1}
        self.duplicates: list[tuple[tuple[str, ...], int]] = []
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._scan(text)

    def _scan(self, text: str) -> None:
        path: list[str] = []
        kinds: list[str] = []
        pending: tuple[str, int] | None = None
        for count, match in enumerate(_TOKEN.finditer(text)):
            if count > _MAX_TOKENS or len(kinds) > 64:
                return
            symbol = match.group()
            if symbol in "{[":
                kinds.append(symbol)
                path.append("")
            elif symbol in "}]":
                if not kinds:
                    return
                kinds.pop()
                path.pop()
            elif symbol == ":" and pending is not None and kinds and kinds[-1] == "{":
                path[-1] = pending[0]
                self._note(tuple(part for part in path if part or part == pending[0]), pending[1])
            pending = (_unquote(symbol), self._line(match.start())) if symbol[0] == '"' else None

    def _note(self, path: tuple[str, ...], line: int) -> None:
        if path in self.lines and path:
            self.duplicates.append((path, line))
        self.lines[path] = line

    def _line(self, offset: int) -> int:
        return bisect_right(self._starts, offset)


def line_of(text: str, path: Sequence[str]) -> int:
    """The line (from 1) of the key that `path` leads to, or of the nearest parent that exists."""
    lines = Positions(text).lines
    for length in range(len(path), -1, -1):
        if (line := lines.get(tuple(path[:length]))) is not None:
            return line
    return 1


def _unquote(symbol: str) -> str:
    try:
        return str(json.loads(symbol))
    except ValueError:
        return symbol[1:-1]
