"""Effects: what the pairs say about each metric, computed for all cells at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from moegate.records import Effect
from moegate.stats import hodges_lehmann, intervals, samples_of, value_of
from orchestrator.compare.pairs import Pair


@dataclass(frozen=True)
class MetricPairs:
    """One metric over the pairs of a cell.

    log_ratios: ln(candidate/baseline), as measured (not signed by `better`). baseline, candidate: values per pair.
    """

    metric: str
    unit: str
    better: str
    log_ratios: tuple[float, ...]
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]

    @property
    def sign(self) -> int:
        """+1 where more is better, -1 where less is."""
        return 1 if self.better == "higher" else -1

    def signed(self) -> tuple[float, ...]:
        """The log ratios, positive is better."""
        return tuple(self.sign * value for value in self.log_ratios)


def measured(pair: Pair, metric: str | None) -> bool:
    """Whether both launches of a pair have a positive value of a metric."""
    both = (samples_of(pair.baseline, metric), samples_of(pair.candidate, metric))
    return all(samples is not None and value_of(samples) is not None for samples in both)


def metric_pairs(pairs: Sequence[Pair], metric: str | None) -> MetricPairs | str:
    """One metric over all pairs, or why it cannot be had. `metric` None is the launches' own primary metric."""
    logs, old, new = [], [], []
    first = None
    for pair in pairs:
        a, b = samples_of(pair.baseline, metric), samples_of(pair.candidate, metric)
        if a is None or b is None:
            return f"metric {metric or '(primary)'} was not measured in every launch; {_offered(pair)}"
        if first is None:
            first = a
        if any((s.metric, s.unit, s.better) != (first.metric, first.unit, first.better) for s in (a, b)):
            return f"metric {first.metric} changes its name, unit or direction between launches"
        x, y = value_of(a), value_of(b)
        if x is None or y is None:
            return f"metric {first.metric} has no positive value in every launch"
        old.append(x)
        new.append(y)
        logs.append(math.log(y) - math.log(x))
    if first is None:
        return "no valid pair"
    return MetricPairs(first.metric, first.unit, first.better, tuple(logs), tuple(old), tuple(new))


def _offered(pair: Pair) -> str:
    names = sorted({samples.metric for samples in pair.baseline.samples})
    return f"measured: {', '.join(names) or 'nothing'}"


def effects_of(metrics: Sequence[MetricPairs]) -> list[Effect]:
    """The effects, in order. Metrics with the same number of pairs are computed together."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, metric in enumerate(metrics):
        by_length[len(metric.log_ratios)].append(index)
    result: dict[int, Effect] = {}
    for indices in by_length.values():
        rows = [metrics[i].log_ratios for i in indices]
        centers = hodges_lehmann(rows)
        lows, highs, level = intervals(rows)
        for row, index in enumerate(indices):
            result[index] = _effect(metrics[index], float(centers[row]), float(lows[row]), float(highs[row]), level)
    return [result[index] for index in range(len(metrics))]


def _effect(metric: MetricPairs, center: float, low: float, high: float, level: float) -> Effect:
    gains = sorted((metric.sign * low, metric.sign * high))
    return Effect(
        metric=metric.metric,
        unit=metric.unit,
        better="higher" if metric.better == "higher" else "lower",
        ratio=math.exp(center),
        low=math.exp(low),
        high=math.exp(high),
        level=level,
        gain=math.expm1(metric.sign * center),
        gain_low=math.expm1(gains[0]),
        gain_high=math.expm1(gains[1]),
        baseline_median=median(metric.baseline),
        candidate_median=median(metric.candidate),
        pairs=len(metric.log_ratios),
    )
