"""matrix.yaml: what a person writes. Read strictly, with line numbers; see docs/matrix.md."""

from __future__ import annotations

from orchestrator.matrix.load import MAX_CELLS, Matrix, load

__all__ = ["MAX_CELLS", "Matrix", "load"]
