"""Predicted and measured: what the kernel gains foretell for a serving cell, from the batch sizes that it saw."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from moegate.records import PlannedCell
from moegate.stats import hodges_lehmann, samples_of, value_of
from orchestrator.compare.pairs import Pair

KernelTimes = Mapping[int, tuple[float, float]]
"""Batch size -> (baseline, candidate) microseconds."""

_PER_BATCH = re.compile(r"kernel_time\D+(\d+)\D*")
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
    nearest = {size: min(times, key=lambda m: (abs(m - size), m)) for size in seen}
    old, new = (sum(n * times[nearest[size]][arm] for size, n in seen.items()) / steps for arm in (0, 1))
    exact = sum(n for size, n in seen.items() if size in times) / steps
    if layers is None or tpot_us is None:
        return Prediction(gain=old / new - 1.0, exact=exact, whole_step=True)
    rest = tpot_us - layers * (old - new)
    return Prediction(gain=tpot_us / rest - 1.0, exact=exact, whole_step=False) if rest > 0.0 else None


def kernel_times(pairs: Sequence[Pair]) -> dict[int, tuple[float, float]]:
    """The kernel times of both arms per batch size, over a kernel-bench cell's pairs.

    The baseline's is its median; the candidate's is that with the ratio that the pairs say, so that a prediction never
    contradicts the gain of the kernel cell itself.
    """
    result: dict[int, tuple[float, float]] = {}
    names = {samples.metric for pair in pairs for samples in pair.baseline.samples}
    for name in names:
        match = _PER_BATCH.fullmatch(name)
        if match is None:
            continue
        values = [(samples_of(p.baseline, name), samples_of(p.candidate, name)) for p in pairs]
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
            total.update({int(size): count for size, count in launch.batch_sizes.items()})
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
