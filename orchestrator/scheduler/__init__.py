"""Runs a plan: journal before action, one lease per attempt, results believed only when proven."""

from __future__ import annotations

from orchestrator.scheduler.rundir import RunDir, newest
from orchestrator.scheduler.session import Session, execute
from orchestrator.scheduler.state import outcomes, read_cells

__all__ = ["RunDir", "Session", "execute", "newest", "outcomes", "read_cells"]
