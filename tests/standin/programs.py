"""Stand-in programs: what a test puts where a vendor's tool or a client would be."""

from __future__ import annotations

import shlex
import sys
import textwrap
from pathlib import Path

__all__ = ["write_program"]

# The kernel splits a `#!` line at its first space and cuts it at 255 bytes, so an interpreter that lies anywhere cannot
# stand there. To sh the second line runs Python on this file; to Python it and the third are a string.
_PYTHON = """\
#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
"""


def write_program(path: Path, body: str, shell: str | None = None) -> Path:
    """Write `body` as a program: Python source for this interpreter, or a script for `shell`, an absolute path."""
    start = f"#!{shell}\n" if shell else _PYTHON.format(python=shlex.quote(sys.executable))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(start + textwrap.dedent(body))
    path.chmod(0o755)
    return path
