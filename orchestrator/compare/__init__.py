"""Compare: launches to pairs to verdicts, recomputed from records alone."""

from __future__ import annotations

from orchestrator.compare.core import TAIL_FLOORS, arms_of, compare
from orchestrator.compare.pairs import CellPairs, Pair, pair_up
from orchestrator.compare.prediction import Prediction, predict

__all__ = [
    "TAIL_FLOORS",
    "CellPairs",
    "Pair",
    "Prediction",
    "arms_of",
    "compare",
    "pair_up",
    "predict",
]
