"""The kinds of cells, one file each. A new kind is one file and one row of `KINDS`."""

from __future__ import annotations

from orchestrator.cells import accuracy, check, kernel_bench, kernel_test, serve, tune
from orchestrator.cells.base import Command, Kind, Work
from orchestrator.cells.proof import wrong_kernels, wrong_proof

__all__ = ["KINDS", "Command", "Kind", "Work", "wrong_kernels", "wrong_proof"]

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (check.KIND, kernel_test.KIND, kernel_bench.KIND, tune.KIND, serve.KIND, accuracy.KIND)
}
"""Every kind by name, in the order of the documentation."""
