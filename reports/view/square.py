"""The 2x2: arm by backend, with intervals, the interaction, and the prediction beside the measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from moegate.records import Interaction, RunBundle
from reports import svg
from reports.text import DASH, one_line, percent, value
from reports.view.changes import anchor_for, proofs
from reports.view.joined import Joined, cell_of, gain_of, predicted_of, span_of

__all__ = ["Square", "SquareRow", "squares"]


@dataclass(frozen=True)
class SquareRow:
    """One backend: the two arms' medians, the gain with its interval, what was predicted, and the cell's outcome."""

    backend: str
    resolved: str
    anchor: str
    joined: Joined
    baseline: str
    candidate: str
    gain: str
    interval: str
    predicted: str
    note: str


@dataclass(frozen=True)
class Square:
    """One interaction: its rows, the picture, and the finding in a sentence."""

    label: str
    metric: str
    arms: tuple[str, str]
    rows: tuple[SquareRow, ...]
    sentence: str
    interaction: str
    plot: Markup


def squares(bundle: RunBundle, cells: tuple[Joined, ...]) -> tuple[Square, ...]:
    """Return every 2x2 of the run, those with the largest interaction first."""
    index = cell_of(cells)
    made = []
    for one in bundle.comparison.interactions:
        members = {backend: index[cell] for backend, cell in one.cells.items() if cell in index}
        if members:
            made.append((abs(one.difference or 0.0), _square(one, members)))
    return tuple(square for _, square in sorted(made, key=lambda pair: -pair[0]))


def _square(one: Interaction, members: dict[str, Joined]) -> Square:
    ordered = dict(sorted(members.items(), key=lambda item: (item[1].cell.control, item[0])))
    first = next(iter(ordered.values()))
    arms = (
        (one_line(first.cell.arms[0], 60), one_line(first.cell.arms[1], 60))
        if len(first.cell.arms) > 1
        else ("baseline", "candidate")
    )
    effect = next((j.verdict.effect for j in ordered.values() if j.verdict and j.verdict.effect), None)
    slopes = [
        svg.Slope(
            name=backend,
            gain=j.verdict.effect.gain,
            low=j.verdict.effect.gain_low,
            high=j.verdict.effect.gain_high,
            control=j.cell.control,
            predicted=j.verdict.predicted,
        )
        for backend, j in ordered.items()
        if j.verdict is not None and j.verdict.effect is not None
    ]
    interaction = _interaction(one)
    sentence = _sentence(arms, ordered)
    plot = Markup("")
    if slopes:
        title = f"Gain from {arms[0]} to {arms[1]} by backend, {one.label}"
        desc = f"{sentence} {interaction}".strip()
        plot = svg.interaction_plot(slopes, arms=arms, title=title, desc=desc)
    return Square(
        label=one_line(one.label, 160),
        metric=f"{effect.metric}, {effect.unit}; {effect.better} is better" if effect else "no metric in common",
        arms=arms,
        rows=tuple(_row(backend, joined) for backend, joined in ordered.items()),
        sentence=sentence,
        interaction=interaction,
        plot=plot,
    )


def _row(backend: str, joined: Joined) -> SquareRow:
    verdict = joined.verdict
    effect = verdict.effect if verdict is not None else None
    proof = next((p for p in reversed(proofs(joined)) if p is not None), None)
    resolved = proof.resolved_backend if proof is not None and proof.resolved_backend != backend else ""
    return SquareRow(
        backend=one_line(backend, 40),
        resolved=one_line(resolved, 40),
        anchor=anchor_for(joined.cell.id),
        joined=joined,
        baseline=value(effect.baseline_median) if effect else DASH,
        candidate=value(effect.candidate_median) if effect else DASH,
        gain=gain_of(joined, effect) if effect else DASH,
        interval=span_of(joined, effect) if effect else "",
        predicted=predicted_of(joined),
        note="control: its config lookup is not reachable, so tuning must not move it" if joined.cell.control else "",
    )


def _sentence(arms: tuple[str, str], members: dict[str, Joined]) -> str:
    parts = []
    for backend, joined in members.items():
        effect = joined.verdict.effect if joined.verdict else None
        if effect is None:
            parts.append(f"{backend} has no comparison")
            continue
        parts.append(f"{backend} {gain_of(joined, effect)} ({joined.look.word})")
    return f"From {one_line(arms[0], 60)} to {one_line(arms[1], 60)}: {'; '.join(one_line(p, 120) for p in parts)}."


def _interaction(one: Interaction) -> str:
    if one.difference is None:
        return ""
    text = f"Interaction {percent(math.expm1(one.difference))}"
    if one.low is not None and one.high is not None:
        text += f" ({percent(math.expm1(one.low))} to {percent(math.expm1(one.high))})"
    return text + ": the gain on the reachable backend beyond that on the control."
