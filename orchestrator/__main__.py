"""`python -m orchestrator` and the `orchestrator` command."""

from __future__ import annotations

from typing import NoReturn

from moegate.entry import guard, unwind_on_termination

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line; every error of ours becomes one line on standard error and its exit code."""
    unwind_on_termination()
    guard("orchestrator", _work)


def _work() -> object:
    from orchestrator.cli import app

    return app()


if __name__ == "__main__":
    main()
