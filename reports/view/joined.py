"""A run by cell: the plan, the outcome, the verdict and the launches of each, joined once for all writers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from moegate.records import (
    CellOutcome,
    CellVerdict,
    Effect,
    Launch,
    Measurement,
    PlannedCell,
    QuarantineRule,
    RunBundle,
)
from reports.text import count, one_line, percent, points
from reports.words import LOOKS, Look, Outcome, outcome_of

__all__ = [
    "Joined",
    "basis_of",
    "cell_of",
    "devices_of",
    "gain_of",
    "join",
    "noise_of",
    "predicted_of",
    "primary_value",
    "rule_for",
    "side_of",
    "span_of",
]


@dataclass(frozen=True)
class Joined:
    """Everything known of one cell.

    `blame` is the exit code that the gate asks for because of this cell (0: none), `decided` its reason in words.
    """

    cell: PlannedCell
    state: str
    outcome: CellOutcome | None
    verdict: CellVerdict | None
    measurements: tuple[Measurement, ...]
    word: Outcome
    rule: QuarantineRule | None
    required: bool
    blame: int
    decided: str

    @property
    def label(self) -> str:
        """The cell's label, on one line and not too long."""
        return one_line(self.cell.label, 160)

    @property
    def look(self) -> Look:
        """How this cell's outcome is shown."""
        return LOOKS[self.word]

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches of each stage's last attempt: screening before confirmation, each in its order."""
        stages: dict[str | None, list[Launch]] = {}
        for measurement in self.measurements:
            fresh: dict[str | None, list[Launch]] = {}
            for launch in measurement.launches:
                fresh.setdefault(launch.stage, []).append(launch)
            stages.update(fresh)
        rows = [launch for launches in stages.values() for launch in launches]
        return tuple(sorted(rows, key=lambda x: (x.stage == "confirm", -1 if x.order is None else x.order)))

    @property
    def interpreter(self) -> bool:
        """Whether any timing here was taken under Triton's interpreter."""
        return any(measurement.interpreter for measurement in self.measurements)

    @property
    def reason(self) -> str:
        """Why the cell came out as it did, in the words of whoever decided it."""
        if self.rule is not None:
            return f"{self.rule.reason} (until {self.rule.until})"
        said = self.outcome.reason if self.outcome is not None else ""
        failure = next((m.failure for m in reversed(self.measurements) if m.failure), None)
        if self.verdict is not None or self.word == "passed":
            return said or failure or (self.verdict.reason if self.verdict is not None else self.look.meaning)
        return said or failure or "no attempt was made"


def rule_for(bundle: RunBundle, cell: PlannedCell) -> QuarantineRule | None:
    """Return the quarantine rule that sets this cell aside on the day of the run, or None."""
    today = (bundle.started or bundle.plan.created)[:10]
    for rule in bundle.plan.gate.quarantine:
        if rule.until[:10] >= today and cell.matches(rule.cells):
            return rule
    return None


def join(bundle: RunBundle) -> tuple[Joined, ...]:
    """Return the cells of a run in the order of the plan, each with all that is known of it."""
    return tuple(_iterate(bundle))


def _iterate(bundle: RunBundle) -> Iterator[Joined]:
    outcomes = {outcome.cell: outcome for outcome in bundle.outcomes}
    verdicts = {verdict.cell: verdict for verdict in bundle.comparison.cells}
    required = bundle.plan.gate.required
    blames = {reason.cell: reason for reason in reversed(bundle.gate.reasons) if reason.cell and reason.exit}
    for cell in bundle.plan.cells:
        outcome, verdict = outcomes.get(cell.id), verdicts.get(cell.id)
        rule = rule_for(bundle, cell)
        blame = blames.get(cell.id)
        yield Joined(
            cell=cell,
            state="PLANNED" if outcome is None else outcome.state,
            outcome=outcome,
            verdict=verdict,
            measurements=bundle.measurements.get(cell.id, ()),
            word=outcome_of(cell, outcome, verdict, rule is not None),
            rule=rule,
            required=any(cell.matches(glob) for glob in required),
            blame=blame.exit if blame is not None else 0,
            decided=blame.message if blame is not None else "",
        )


def cell_of(cells: tuple[Joined, ...]) -> dict[str, Joined]:
    """Index joined cells by id."""
    return {joined.cell.id: joined for joined in cells}


def side_of(joined: Joined, launch: Launch) -> int:
    """Return 0 for a baseline launch, 1 for a candidate launch; the arms of a cell are (baseline, candidate).

    In an A/A cell both arms have one name: there the roles alternate with the pair, as they do in comparison.
    """
    arms = joined.cell.arms
    if len(arms) > 1 and arms[0] != arms[1]:
        return int(launch.arm == arms[1])
    return ((launch.order or 0) + (launch.pair or 0)) % 2


def devices_of(*cells: Joined) -> tuple[str, ...]:
    """Write the devices that launches ran on, each once, as `name (identity)`: what it is, and which one."""
    devices = (launch.device for joined in cells for launch in joined.launches if launch.device.identity)
    found = dict.fromkeys((device.name, device.identity) for device in devices)
    return tuple(one_line(f"{name} ({identity})" if name else identity, 120) for name, identity in found)


def gain_of(joined: Joined, effect: Effect) -> str:
    """Write an effect's gain: percent, or points where accuracies are compared by difference."""
    return points(effect.gain) if joined.cell.kind == "accuracy" else percent(effect.gain)


def span_of(joined: Joined, effect: Effect) -> str:
    """Write the interval of an effect's gain, as `gain_of` writes the gain."""
    write = points if joined.cell.kind == "accuracy" else percent
    return f"{write(effect.gain_low)} to {write(effect.gain_high)}"


def basis_of(joined: Joined, effect: Effect) -> str:
    """Say which pairs an effect's gain is of; empty where that is not known."""
    verdict = joined.verdict
    if verdict is None or joined.cell.kind == "accuracy":
        return ""
    screen, fresh = len(verdict.log_ratios_screen), len(verdict.log_ratios_confirm)
    if fresh and effect.pairs == fresh:
        return f"{count(fresh, 'fresh pair')} alone"
    if fresh and effect.pairs == screen + fresh:
        return f"all {effect.pairs} pairs, {screen} of the screening and {fresh} fresh"
    return count(effect.pairs, "pair")


def noise_of(joined: Joined) -> str:
    """Say what a control that was not shown to move may still have done within its noise; empty for other cells."""
    effect = joined.verdict.effect if joined.verdict is not None and joined.word == "unmoved" else None
    return f"may have moved by {span_of(joined, effect)}" if effect is not None else ""


def predicted_of(joined: Joined) -> str:
    """Write what the kernels predict for a serving cell, and whether their share of a step is left out of it."""
    verdict = joined.verdict
    if verdict is None or verdict.predicted is None:
        return ""
    return percent(verdict.predicted) + (" (kernel alone)" if verdict.predicted_whole_step else "")


def primary_value(launch: Launch) -> float | None:
    """Return the median of a launch's primary metric, or None."""
    samples = launch.primary()
    return median(samples.values) if samples is not None and samples.values else None
