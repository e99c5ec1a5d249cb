"""`python -m tuner`: the command line, with every failure of ours turned into its exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from moegate.entry import guard

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit."""
    kept = "; what was measured is in the journal, the same command goes on" if sys.argv[1:2] == ["tune"] else ""
    guard("tuner", _work, interrupted=f"interrupted{kept}")


def _work() -> object:
    from tuner.cli import app

    return app(standalone_mode=False)


if __name__ == "__main__":
    main()
