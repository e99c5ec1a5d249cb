"""Predicted and measured: what the kernel gains foretell for a serving cell, from the batch sizes that it saw."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moegate.canonical import whole
from moegate.records import PlannedCell
from moegate.stats import hodges_lehmann, samples_of, value_of
from orchestrator.compare.pairs import Pair

KernelTimes = Mapping[int, tuple[float, float]]
"""Batch size -> (baseline, candidate) microseconds."""

_PER_BATCH = re.compile(r"kernel_time\D+(\d{1,9})\D*")
_MOST_BATCH = 1_000_000_000
_MOST_GAIN = 1e6  # a step that is almost all saving tells nothing but that the two clocks disagree
_TPOT = "median_tpot_ms"
_OP = "fused_experts"
_SHARED_AXES = ("engine", "moe_runner_backend", "dtype")


@dataclass(frozen=True)
class Prediction:
    """The gain that the kernels foretell.

    gain: fraction, in TPOT terms (0.05 is 5 % faster). exact: the share of the server's steps whose batch size was
    timed itself rather than the nearest one. whole_step: the kernel's share of a step is not known, so the gain is
    that of the kernel alone: what a step that is nothing but the kernel would gain.
    """

    gain: float
    exact: float
    whole_step: bool


def predict(
    times: KernelTimes, seen: Mapping[int, int], *, layers: int | None = None, tpot_us: float | None = None
) -> Prediction | None:
    """Predict a TPOT gain.

    times: per batch size, microseconds of one layer's experts. seen: batch size -> steps. layers: MoE layers of the
    model; tpot_us: the baseline's time per output token, on the same clock as `times`. Without either the kernel's own
    gain is given.
    None without times or steps, or where the saving would exceed the whole step.
    """
    steps = sum(seen.values())
    if not times or steps <= 0 or any(min(pair) <= 0.0 for pair in times.values()):
        return None
    timed = sorted(times)
    nearest = {size: _nearest(timed, size) for size in seen}
    old, new = (sum(n * times[nearest[size]][arm] for size, n in seen.items()) / steps for arm in (0, 1))
    exact = sum(n for size, n in seen.items() if size in times) / steps
    if layers is None or tpot_us is None:
        return Prediction(gain=old / new - 1.0, exact=exact, whole_step=True)
    rest = tpot_us - layers * (old - new)
    # Written as a product: a quotient by next to nothing overflows.
    return Prediction(tpot_us / rest - 1.0, exact, whole_step=False) if rest * _MOST_GAIN > tpot_us else None


def _nearest(timed: Sequence[int], size: int) -> int:
    """The timed batch size next to this one; of two, the smaller."""
    at = bisect_left(timed, size)
    return min(timed[max(at - 1, 0) : at + 1], key=lambda m: (abs(m - size), m))


def kernel_times(pairs: Sequence[Pair]) -> dict[int, tuple[float, float]]:
    """The kernel times of both arms per batch size, over a kernel-bench cell's pairs.

    The baseline's is its median; the candidate's is that with the ratio that the pairs say, so that a prediction never
    contradicts the gain of the kernel cell itself.
    """
    result: dict[int, tuple[float, float]] = {}
    tables = [[{s.metric: s for s in reversed(launch.samples)} for launch in (p.baseline, p.candidate)] for p in pairs]
    for name in {name for old, _ in tables for name in old}:
        match = _PER_BATCH.fullmatch(name)
        if match is None:
            continue
        values = [(old.get(name), new.get(name)) for old, new in tables]
        both = [(value_of(a), value_of(b)) for a, b in values if a is not None and b is not None]
        known = [(a, b) for a, b in both if a is not None and b is not None]
        if known:
            baseline = median(a for a, _ in known)
            ratio = math.exp(float(hodges_lehmann([math.log(b / a) for a, b in known])))
            result[int(match[1])] = (baseline, baseline * ratio)
    return result


def batch_sizes(pairs: Sequence[Pair]) -> dict[int, int]:
    """The batch sizes that the servers of a cell saw, with the number of steps of each, over both arms."""
    total: Counter[int] = Counter()
    for pair in pairs:
        for launch in (pair.baseline, pair.candidate):
            for size, count in launch.batch_sizes.items():
                if (number := whole(size, 1, _MOST_BATCH)) is not None and count > 0:
                    total[number] += count
    return dict(total)


def baseline_tpot_us(pairs: Sequence[Pair]) -> float | None:
    """The baseline's median time per output token, in microseconds, or None where it cannot be set against a kernel's.

    The two come from processes that ran minutes apart. A device's own time is the same then; a CPU's is shared with
    whoever else runs, and three times as busy a host makes the kernel look like a third of its share of the step. Arms
    alternate, so their ratio does not care.
    """
    if any(pair.baseline.device.kind == "cpu" for pair in pairs):
        return None
    found = [samples_of(pair.baseline, _TPOT) for pair in pairs]
    values = [value_of(samples) for samples in found if samples is not None]
    known = [value for value in values if value is not None]
    return 1000.0 * median(known) if known else None


def matches(serve: PlannedCell, kernel: PlannedCell) -> bool:
    """Whether a kernel-bench cell times the kernel of a serve cell: same pool, model, engine, backend, dtype."""
    if (serve.pool, serve.model) != (kernel.pool, kernel.model) or kernel.axes.get("op", _OP) != _OP:
        return False
    shared = [axis for axis in _SHARED_AXES if axis in serve.axes and axis in kernel.axes]
    return all(serve.axes[axis] == kernel.axes[axis] for axis in shared)
