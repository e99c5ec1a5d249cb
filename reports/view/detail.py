"""The drill-down of one cell, within a share of the page's budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from moegate.records import Effect, Launch, PlannedCell, RunBundle
from moegate.stats import hodges_lehmann
from reports.text import clip, count, duration, one_line, percent, tail, value
from reports.view.changes import ConfigSet, ConfigTable, anchor_for, proofs
from reports.view.figures import history_figure, latency_curves, launch_strip
from reports.view.joined import (
    Joined,
    basis_of,
    devices_of,
    gain_of,
    noise_of,
    predicted_of,
    primary_value,
    side_of,
    span_of,
)
from reports.view.reading import ways

__all__ = ["Budget", "Detail", "EffectLine", "badges_of", "build_detail"]


@dataclass(frozen=True)
class Budget:
    """What one cell's drill-down may hold, so that a page of many cells stays light."""

    launches: int
    metrics: int
    cases: int
    log: int
    curves: int
    steps: int

    @classmethod
    def ladder(cls, cells: int) -> tuple[Budget, ...]:
        """Return the budgets to try for a page of so many cells, richest first."""
        return _LADDER if cells <= 60 else _LADDER[1:] if cells <= 400 else _LADDER[3:]


_LADDER = (
    Budget(launches=160, metrics=40, cases=200, log=6000, curves=3, steps=160),
    Budget(launches=16, metrics=6, cases=12, log=600, curves=1, steps=40),
    Budget(launches=10, metrics=2, cases=6, log=300, curves=1, steps=24),
    Budget(launches=4, metrics=1, cases=3, log=160, curves=0, steps=0),
    Budget(launches=0, metrics=1, cases=1, log=80, curves=0, steps=0),
)


# A command that is cut off cannot be pasted; this only bounds what nobody would paste.
_MOST_COMMAND = 4000
_WRITES = {
    False: "What it writes lies in the folder where it is pasted; the run stays as it is.",
    True: "Each writes into a folder of its arm's name, in the one where it is pasted; the run stays as it is.",
}


@dataclass(frozen=True)
class EffectLine:
    """One metric of a cell in words; `gates` marks the one that decides."""

    metric: str
    baseline: str
    candidate: str
    gain: str
    interval: str
    level: str
    better: str
    gates: bool


@dataclass(frozen=True)
class LaunchLine:
    """One launch of a cell in words."""

    order: str
    stage: str
    pair: str
    arm: str
    candidate: bool
    value: str
    wall: str
    device: str
    clocks: str
    void: str


@dataclass(frozen=True)
class Detail:
    """Everything the drill-down shows."""

    anchor: str
    joined: Joined
    badges: tuple[str, ...]
    arms: tuple[str, str]
    facts: tuple[tuple[str, str], ...]
    sentence: str
    effects: tuple[EffectLine, ...]
    basis: str
    strip: Markup
    strip_note: str
    strip_keys: tuple[str, str]
    measured: str
    launches: tuple[LaunchLine, ...]
    launches_hidden: int
    clocks: bool
    backend: str
    config_anchor: str | None
    config_note: str
    tables: tuple[ConfigTable, ...]
    predicted: tuple[str, str, str] | None
    memory: str
    divergence: str
    attempts: tuple[tuple[str, ...], ...]
    cases: tuple[tuple[str, str, str], ...]
    cases_hidden: int
    commands: tuple[tuple[str, str], ...]
    commands_note: str
    log: str
    curves: tuple[tuple[str, Markup], ...]
    history: Markup


def build_detail(bundle: RunBundle, joined: Joined, budget: Budget, configs: dict[str, ConfigSet]) -> Detail:
    """Build the drill-down of one cell; `configs` maps cell id to its config set."""
    cell, launches = joined.cell, joined.launches
    lines = tuple(_launch_line(joined, launch) for launch in launches[: budget.launches])
    ran = configs.get(cell.id)
    bad = joined.word in ("failed", "missing", "regressed")
    strip, note = launch_strip(joined)
    arms, commands = _arms(cell), _commands(bundle, cell)
    measured = next((samples for launch in launches if (samples := launch.primary()) is not None), None)
    cases = sorted(_cases(joined), key=lambda case: (case[1] != "failed", case[1] != "skipped"))
    return Detail(
        anchor=anchor_for(cell.id),
        joined=joined,
        badges=badges_of(joined),
        arms=arms,
        facts=_facts(joined),
        sentence=_sentence(joined),
        effects=effect_lines(joined, budget.metrics),
        basis=_basis(joined),
        strip=strip,
        strip_note=note,
        strip_keys=arms if len(set(cell.arms)) == 1 else (f"{arms[0]} (A)", f"{arms[1]} (B)"),
        measured=one_line(measured.metric, 60) if measured is not None else "",
        launches=lines,
        launches_hidden=len(launches) - len(lines),
        clocks=any(line.clocks for line in lines),
        backend=_backend(joined),
        config_anchor=ran.anchor if ran is not None else None,
        config_note=_config_note(ran.changes if ran is not None else 0),
        tables=ran.tables if ran is not None and budget.curves > 1 else (),
        predicted=_predicted(joined),
        memory=_memory(joined),
        divergence=_divergence(joined),
        attempts=_attempts(joined),
        cases=tuple(cases[: budget.cases]),
        cases_hidden=max(0, len(cases) - budget.cases),
        commands=commands,
        commands_note=_WRITES[len(commands) > 1],
        log=tail(joined.outcome.log_tail, budget.log * (4 if bad else 1)) if joined.outcome else "",
        curves=latency_curves(joined, budget.curves, budget.steps),
        history=history_figure(bundle, joined) if budget.curves else Markup(""),
    )


def _arms(cell: PlannedCell) -> tuple[str, str]:
    """What the two sides of a cell are called. In an A/A cell one arm is both, as A and as B of its pairs."""
    names = [one_line(name, 60) for name in cell.arms]
    if len(names) < 2:
        return "baseline", "candidate"
    return (f"{names[0]} as A", f"{names[1]} as B") if names[0] == names[1] else (names[0], names[1])


def _commands(bundle: RunBundle, cell: PlannedCell) -> tuple[tuple[str, str], ...]:
    """(role, line) of what reproduces a cell: its arms by role and name; an A/A cell types one line for both."""
    roles = dict(zip(reversed(cell.arms), ("candidate", "baseline"), strict=False)) if not cell.aa else {}
    lines = [(typed.arm, clip(typed.line, _MOST_COMMAND)) for typed in bundle.commands.get(cell.id, ())]
    return tuple((one_line(f"{arm}, {roles[arm]}" if arm in roles else arm, 80), line) for arm, line in lines)


def _basis(joined: Joined) -> str:
    """Which way round the gain is, and of which pairs; with the screening's among them, what the fresh ones say too."""
    verdict = joined.verdict
    basis = basis_of(joined, verdict.effect) if verdict is not None and verdict.effect is not None else ""
    if verdict is None or not basis:
        return ""
    fresh = verdict.log_ratios_confirm
    pooled = fresh and verdict.effect is not None and verdict.effect.pairs > len(fresh)
    alone = f"; the fresh ones alone give {percent(math.expm1(hodges_lehmann(fresh)))}" if pooled else ""
    way = "" if joined.cell.kind == "accuracy" else f"Gain: {ways(*_arms(joined.cell))}. "
    return f"{way}The gain is of {basis}{alone}."


def _divergence(joined: Joined) -> str:
    verdict = joined.verdict
    return one_line(verdict.divergence.sentence(), 400) if verdict is not None and verdict.divergence else ""


def badges_of(joined: Joined) -> tuple[str, ...]:
    """Return what sets a cell apart, as short words."""
    verdict = joined.verdict
    flags = (("A/A", joined.cell.aa), ("required", joined.required))
    badges = [name for name, on in flags if on]
    if joined.blame:
        badges.insert(0, f"exit {joined.blame}")
    if verdict is not None and verdict.void_launches:
        badges.append(f"{verdict.void_launches} void")
    if joined.word in ("quarantined", "held", "moved") and verdict is not None and verdict.verdict is not None:
        badges.append(verdict.verdict)
    badges += [noise] if (noise := noise_of(joined)) else []
    return tuple(badges)


def _facts(joined: Joined) -> tuple[tuple[str, str], ...]:
    cell = joined.cell
    rows = [
        ("kind", cell.kind),
        ("pool", cell.pool or ""),
        ("model", cell.model or ""),
        ("arms", " → ".join(cell.arms)),
    ]
    for name, raw in cell.axes.items():
        if name not in ("pool", "model", "kind", "arms"):
            shown = ", ".join(map(str, raw)) if isinstance(raw, list | tuple) else _flat(raw)
            rows.append((name, shown))
    rows += [("state", joined.state), ("device", ", ".join(devices_of(joined)[:4])), ("why", cell.why)]
    return tuple((one_line(name, 40), one_line(shown, 240)) for name, shown in rows if shown)


def _flat(raw: object) -> str:
    return ", ".join(f"{key} {item}" for key, item in raw.items()) if isinstance(raw, dict) else str(raw)


def _sentence(joined: Joined) -> str:
    verdict = joined.verdict
    if joined.rule is not None or verdict is None or verdict.effect is None:
        return one_line(joined.reason, 400)
    said = one_line((verdict.reason or joined.look.meaning), 400)
    if joined.word in ("improved", "regressed") and verdict.reason:
        said = f"{joined.look.meaning[:1].upper()}{joined.look.meaning[1:]}: {said}"
    # Nobody waits for a control to be settled: that it does not move is all that it is for.
    if verdict.verdict == "inconclusive" and verdict.more_pairs and joined.word == "inconclusive":
        return f"{said.removesuffix('.')}. About {count(verdict.more_pairs, 'more pair')} would settle it."
    noise = noise_of(joined)
    return f"{said.removesuffix('.')}. Not shown to move, and not shown to stand still: it {noise}." if noise else said


# What people ask about first; the others follow as they come.
_TPOT = "median_tpot_ms"
_FIRST = (_TPOT, "median_ttft_ms", "output_throughput", "request_throughput", "p99_ttft_ms", "p99_tpot_ms")


def effect_lines(joined: Joined, most: int) -> tuple[EffectLine, ...]:
    """Return at most `most` metrics of a cell in words, the deciding one first."""
    verdict = joined.verdict
    if verdict is None:
        return ()
    others = sorted(verdict.others, key=lambda e: _FIRST.index(e.metric) if e.metric in _FIRST else len(_FIRST))
    ordered = ([verdict.effect] if verdict.effect is not None else []) + others
    return tuple(_effect_line(joined, effect, effect is verdict.effect) for effect in ordered[:most])


def _effect_line(joined: Joined, effect: Effect, gates: bool) -> EffectLine:
    return EffectLine(
        metric=one_line(effect.metric, 60),
        baseline=value(effect.baseline_median, effect.unit),
        candidate=value(effect.candidate_median, effect.unit),
        gain=gain_of(joined, effect),
        interval=span_of(joined, effect),
        level=percent(effect.level, 1, sign=False),
        better=f"{effect.better} is better",
        gates=gates,
    )


def _launch_line(joined: Joined, launch: Launch) -> LaunchLine:
    samples = launch.primary()
    return LaunchLine(
        order="" if launch.order is None else str(launch.order + 1),  # people count from 1, records from 0
        stage=launch.stage or "",
        pair="" if launch.pair is None else str(launch.pair + 1),
        arm=one_line(launch.arm or "", 40),
        candidate=side_of(joined, launch) == 1,
        value=value(primary_value(launch), samples.unit if samples else ""),
        wall=duration(launch.wall_s),
        device=one_line(launch.device.identity, 60),
        clocks=_clocks(launch),
        void=one_line(launch.void_reason or "", 160),
    )


# Covariates of a launch that tell its clocks: key in its detail -> unit.
_CLOCKS = {"clock_mhz": "MHz", "memory_clock_mhz": "MHz memory", "temperature_c": "°C", "power_limit_w": "W"}


def _clocks(launch: Launch) -> str:
    words = [
        f"{_flat(launch.detail[key])} {unit}" for key, unit in _CLOCKS.items() if launch.detail.get(key) is not None
    ]
    throttled = launch.detail.get("throttle_reasons")
    return one_line(", ".join(words + ([f"throttled: {_flat(throttled)}"] if throttled else [])), 120)


def _backend(joined: Joined) -> str:
    base, cand = proofs(joined)
    some = cand or base
    if some is None:
        return ""
    resolved = sorted({proof.resolved_backend for proof in (base, cand) if proof is not None})
    ran = some.functions.get("fused_experts", "")
    told = "" if not ran or ran in resolved else f", {ran}"
    return one_line(f"asked for {some.requested_backend}, ran {' / '.join(resolved)} (engine {some.engine}{told})", 200)


def _config_note(changed: int) -> str:
    return f"the arms differ at {count(changed, 'batch size')}" if changed else "the same in both arms"


def _predicted(joined: Joined) -> tuple[str, str, str] | None:
    """Return the predicted gain, the measured one, and of which metric: time per output token where it was measured."""
    verdict = joined.verdict
    if verdict is None or verdict.predicted is None or verdict.effect is None:
        return None
    tpot = next((effect for effect in (verdict.effect, *verdict.others) if effect.metric == _TPOT), verdict.effect)
    return predicted_of(joined), percent(tpot.gain), one_line(tpot.metric, 60)


def _memory(joined: Joined) -> str:
    peaks = joined.verdict.peak_memory if joined.verdict else {}
    ordered = [arm for arm in dict.fromkeys((*joined.cell.arms, *sorted(peaks))) if arm in peaks]
    return ", ".join(f"{one_line(arm, 40)} {peaks[arm] / 2**20:,.0f} MiB" for arm in ordered[:4])


def _attempts(joined: Joined) -> tuple[tuple[str, ...], ...]:
    attempts = joined.outcome.attempts if joined.outcome else ()
    rows = [
        (
            str(a.number),
            a.stage,
            a.state,
            duration(a.wall_s),
            a.isolation,
            one_line(a.device, 60),
            one_line(a.reason, 200),
        )
        for a in attempts[-8:]
    ]
    return tuple(rows)


def _cases(joined: Joined) -> list[tuple[str, str, str]]:
    return [
        (one_line(case.name, 120), case.status, one_line(case.message, 240))
        for measurement in joined.measurements
        for case in measurement.cases
    ]
