"""`python -m orchestrator` and the `orchestrator` command."""

from __future__ import annotations

import sys

from moegate.errors import MoegateError
from moegate.exits import Exit


def main() -> None:
    """Run the command line; every error of ours becomes one line on standard error and its exit code."""
    from orchestrator.cli import app

    try:
        app()
    except MoegateError as error:
        print(f"orchestrator: {error}", file=sys.stderr)
        sys.exit(int(error.exit))
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); nothing is left to say, and Python would complain at exit.
        sys.stderr.close()
        sys.exit(int(Exit.OK))


if __name__ == "__main__":
    main()
