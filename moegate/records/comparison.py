"""What the pairs say: one verdict per cell, and what the gate makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from moegate.records.plan import CellKind, Family

__all__ = ["CellVerdict", "Comparison", "Divergence", "Effect", "GateReason", "GateResult", "Interaction"]

Verdict = Literal["improved", "regressed", "equivalent", "inconclusive"]


@dataclass(frozen=True)
class Effect:
    """Candidate against baseline for one metric, as a ratio of medians per pair.

    `ratio`, `low` and `high` are candidate/baseline (1.05 = 5 % more of the metric); `better` tells which way is good.
    `level` is the interval's true coverage (a signed-rank interval of few pairs cannot reach 95 %). `gain` is the
    change in the good direction as a fraction: +0.05 is 5 % better, whatever the metric.
    """

    metric: str
    unit: str
    better: Literal["lower", "higher"]
    ratio: float
    low: float
    high: float
    level: float
    gain: float
    gain_low: float
    gain_high: float
    baseline_median: float
    candidate_median: float
    pairs: int


@dataclass(frozen=True)
class Divergence:
    """Where two arms' greedy answers to the same samples part.

    `diverged` of `samples` answers differ; `sample` is the one that differs earliest, at `position` (from 0, in
    `unit`s), where the arms said `baseline` and `candidate` (with their log-probability where it is known).
    `median_position` is over all that differ. `largest_gap` is the largest difference of log-probabilities while both
    said the same.
    """

    samples: int
    diverged: int
    unit: Literal["token", "character"] = "token"
    largest_gap: float | None = None
    sample: str | None = None
    position: int | None = None
    median_position: float | None = None
    baseline: str = ""
    candidate: str = ""

    def sentence(self) -> str:
        """It in words."""
        gap = "" if self.largest_gap is None else f"; log-probabilities differ by at most {self.largest_gap:.2g} before"
        if not self.diverged:
            return f"all {self.samples} answers are the same{gap.removesuffix(' before')}"
        return (
            f"{self.diverged} of {self.samples} answers differ, first {self.sample} at {self.unit} {self.position}: "
            f"{self.baseline} became {self.candidate} (median {self.median_position:g}){gap}"
        )


@dataclass(frozen=True)
class CellVerdict:
    """One cell's comparison. `verdict` is None where there are not the pairs for one; `reason` then says why.

    `log_ratios_screen` and `log_ratios_confirm` are ln(candidate/baseline) of the primary metric per valid pair, signed
    so that positive is better. `p` is one-sided against the margin; `detectable` is the minimum detectable effect
    (fraction) and `more_pairs` an estimate of how many further pairs would settle an inconclusive cell. `predicted` is
    the gain (fraction) that the kernel cells foretell for a serving cell, from the batch sizes that its server saw;
    `predicted_whole_step` says that it takes the kernel for the whole of a step, because its share is not known.
    `divergence` is where the answers of an accuracy cell part.
    """

    cell: str
    label: str
    kind: CellKind
    family: Family
    verdict: Verdict | None
    reason: str
    control: bool = False
    aa: bool = False
    effect: Effect | None = None
    others: tuple[Effect, ...] = ()
    log_ratios_screen: tuple[float, ...] = ()
    log_ratios_confirm: tuple[float, ...] = ()
    p: float | None = None
    threshold: float | None = None
    detectable: float | None = None
    more_pairs: int | None = None
    void_launches: int = 0
    device: str = ""
    peak_memory: dict[str, int] = field(default_factory=dict)
    predicted: float | None = None
    predicted_whole_step: bool = False
    divergence: Divergence | None = None

    @property
    def null(self) -> bool:
        """Whether nothing may move here: a control or an A/A cell."""
        return self.control or self.aa


@dataclass(frozen=True)
class Interaction:
    """The 2x2 of one (model, engine, kind, other axes): the cells of one row per backend.

    `cells` maps backend to cell id; `difference` is the gain on the backend whose lookup is reachable less the gain on
    the control, with its interval, in log ratio.
    """

    label: str
    kind: CellKind
    cells: dict[str, str]
    difference: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All verdicts of a run (`comparison.json`)."""

    cells: tuple[CellVerdict, ...]
    interactions: tuple[Interaction, ...] = ()
    voided_pools: dict[str, str] = field(default_factory=dict)
    aa_cells: int = 0
    aa_flagged: int = 0
    aa_upper: float | None = None
    notes: tuple[str, ...] = ()
    schema: int = 1


@dataclass(frozen=True)
class GateReason:
    """One thing that decided the exit code, or that a person should know (`exit` 0)."""

    exit: int
    message: str
    cell: str | None = None


@dataclass(frozen=True)
class GateResult:
    """The gate's answer (`gate.json`). `sentence` is the one line that a person reads first."""

    exit: int
    sentence: str
    reasons: tuple[GateReason, ...]
    counts: dict[str, int]
    policy: dict[str, Any] = field(default_factory=dict)
    schema: int = 1
