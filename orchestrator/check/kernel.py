"""The hash of our own kernel sources, found without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from moegate import canonical


def kernel_hash() -> str | None:
    """What `tuner` writes into provenance for our kernels today; None where they are not installed."""
    spec = find_spec("xkernels")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "ops" / "_details"
    return canonical.tree_digest(folder) if folder.is_dir() else None
