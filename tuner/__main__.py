"""`python -m tuner`: the command line, with every failure of ours turned into its exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from moegate.entry import guard

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit."""
    from tuner.cli import app

    kept = "; what was measured is in the journal, the same command goes on" if sys.argv[1:2] == ["tune"] else ""
    guard("tuner", lambda: app(standalone_mode=False), interrupted=f"interrupted{kept}")


if __name__ == "__main__":
    main()
