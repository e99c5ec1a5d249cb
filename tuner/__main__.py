"""`python -m tuner`: the command line, with every failure of ours turned into its exit code."""

from __future__ import annotations

from typing import NoReturn

from moegate.entry import guard

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit."""
    from tuner.cli import app

    guard(
        "tuner",
        lambda: app(standalone_mode=False),
        interrupted="interrupted; what was measured is in the journal, the same command goes on",
    )


if __name__ == "__main__":
    main()
