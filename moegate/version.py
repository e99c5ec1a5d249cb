"""Which version of ourselves runs: what the installation says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["UNKNOWN", "own_version"]

UNKNOWN = "0+checkout"


def own_version() -> str:
    """The installed version of moegate; `UNKNOWN` where a checkout is used without an installation.

    An arm with a `source` is installed as `<version>+g<commit>`, so this says which commit a process runs.
    """
    try:
        return version("moegate")
    except PackageNotFoundError:
        return UNKNOWN
