"""matrix.yaml: what a person writes. Read strictly, with line numbers; see docs/matrix.md."""

from __future__ import annotations

from orchestrator.matrix.load import Matrix, load

__all__ = ["Matrix", "load"]
