"""moegate's own lookup, in the shape that all engines share."""

from __future__ import annotations

from pathlib import Path

from moegate.configs.names import ConfigKey, Projection
from moegate.configs.tree import ConfigTree, Resolution


def lookup(root: Path | None, key: ConfigKey, projection: Projection, triton: str) -> Resolution:
    """See `ConfigTree.resolve`."""
    return ConfigTree(root).resolve(key, projection, triton=triton)
