"""`python -m serving`: the command line, with every failure of ours turned into its exit code."""

from __future__ import annotations

from typing import NoReturn

from moegate.entry import guard

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line and exit."""
    guard("serving", _work)


def _work() -> object:
    from serving.cli import app

    return app(standalone_mode=False)


if __name__ == "__main__":
    main()
