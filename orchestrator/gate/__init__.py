"""Gate: verdicts and outcomes to one exit code, and the self test of that judgement."""

from __future__ import annotations

from orchestrator.gate.policy import PASSING, STATE_EXITS, gate

__all__ = ["PASSING", "STATE_EXITS", "gate"]
