"""Accuracy cells: the same samples in both arms, or no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moegate.records import Effect
from moegate.stats import DifferentSamples, accuracy_non_inferiority
from orchestrator.compare.pairs import Pair

MARGIN = 0.005
"""Half a point of accuracy: the most that may be lost."""

_METRIC = "accuracy"


@dataclass(frozen=True)
class AccuracyAnswer:
    """verdict None: refused, `reason` says why. more: about how many further samples would settle it."""

    verdict: Literal["improved", "regressed", "equivalent", "inconclusive"] | None
    reason: str
    effect: Effect | None = None
    p: float | None = None
    more: int | None = None


def judge_accuracy(pair: Pair, margin: float = MARGIN) -> AccuracyAnswer:
    """Non-inferiority of the candidate, sample by sample. Scores: a launch's `detail["scores"]`, sample id -> 0..1."""
    scores = [_scores(launch.detail) for launch in (pair.baseline, pair.candidate)]
    if scores[0] is None or scores[1] is None:
        return AccuracyAnswer(None, "a launch without scores per sample")
    try:
        result = accuracy_non_inferiority(scores[0], scores[1], margin)
    except DifferentSamples as error:
        return AccuracyAnswer(None, str(error))
    except ValueError as error:
        return AccuracyAnswer(None, f"scores cannot be compared: {error}")
    changed = f"{result.gained} gained, {result.lost} lost of {result.samples} samples"
    p = "" if result.p is None else f", McNemar p {result.p:.2g}"
    bounds = f"{100 * result.difference:+.2f} points, at worst {100 * result.low:+.2f}"
    reason = f"{bounds} (margin {100 * margin:g}); {changed}{p}"
    return AccuracyAnswer(
        result.verdict, reason, _effect(result.baseline, result.candidate, result), result.p, result.more_samples
    )


def _effect(baseline: float, candidate: float, result: Any) -> Effect:
    """Accuracy is compared by difference: `gain` and its bounds are points / 100, `ratio` is for display."""
    scale = baseline if baseline > 0 else 1.0
    return Effect(
        metric=_METRIC,
        unit="fraction",
        better="higher",
        ratio=candidate / scale,
        low=(baseline + result.low) / scale,
        high=(baseline + result.high) / scale,
        level=0.9,
        gain=result.difference,
        gain_low=result.low,
        gain_high=result.high,
        baseline_median=baseline,
        candidate_median=candidate,
        pairs=1,
    )


def _scores(detail: Mapping[str, Any]) -> dict[str, float] | None:
    scores = detail.get("scores")
    if not isinstance(scores, dict) or not all(isinstance(v, int | float) for v in scores.values()):
        return None
    try:
        return {str(key): float(value) for key, value in scores.items()}
    except OverflowError:  # a whole number beyond any float
        return None
