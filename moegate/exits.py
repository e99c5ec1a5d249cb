"""Exit codes of every command, and which one wins when several apply."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

__all__ = ["Exit", "rank", "worst"]


class Exit(IntEnum):
    """Process exit codes; documented for scripts in docs/exit-codes.md."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    INFRA = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130
    TERMINATED = 143


# A wrong input makes every other answer meaningless; a proven regression outranks what could not be measured.
_PRECEDENCE = (Exit.TERMINATED, Exit.INTERRUPTED, Exit.USAGE, Exit.REGRESSION, Exit.INFRA, Exit.INCONCLUSIVE, Exit.OK)


def rank(code: int) -> int:
    """Return a sort key: what wins by precedence comes first, and a code that is none of ours comes with INFRA."""
    return _PRECEDENCE.index(Exit(code) if code in _PRECEDENCE else Exit.INFRA)


def worst(codes: Iterable[int]) -> Exit:
    """Return the code that wins by precedence (signals, then 2, 1, 3, 4, 0); OK for no codes."""
    seen = {Exit(code) for code in codes}
    return next((code for code in _PRECEDENCE if code in seen), Exit.OK)
