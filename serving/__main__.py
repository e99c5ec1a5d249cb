"""`python -m serving`: the command line, with every failure of ours turned into its exit code."""

from __future__ import annotations

import sys

from moegate.errors import MoegateError
from moegate.exits import Exit

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    from serving.cli import app

    try:
        code = app(standalone_mode=False)
    except MoegateError as error:
        print(f"serving: {error}", file=sys.stderr)
        code = error.exit
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except Exception as error:
        code = _click_exit(error)
    sys.exit(int(code or 0))


def _click_exit(error: Exception) -> int:
    """The command-line library's own exceptions: usage errors print themselves; anything else is a defect."""
    show = getattr(error, "show", None)
    if show is not None:
        show(file=sys.stderr)
        return Exit.USAGE
    if type(error).__name__ == "Abort":
        return Exit.INTERRUPTED
    raise error


if __name__ == "__main__":
    main()
