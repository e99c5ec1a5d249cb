"""From a matrix to a plan: every cell, decided before anything runs."""

from __future__ import annotations

from orchestrator.plan.build import build, select
from orchestrator.plan.estimate import History, read_history

__all__ = ["History", "build", "read_history", "select"]
