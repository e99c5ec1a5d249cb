"""A laboratory that makes plans and measurements of known truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moegate.records import (
    ComparePolicy,
    DeviceIdentity,
    GatePolicy,
    Launch,
    Measurement,
    Plan,
    PlannedCell,
    Samples,
)
from moegate.stats import turns

DEVICE = DeviceIdentity(kind="cuda", name="NVIDIA H200", identity="GPU-1")


def cell(name: str, kind: str = "serve", **changes: Any) -> PlannedCell:
    base = PlannedCell(
        id=name,
        kind=kind,  # type: ignore[arg-type]
        label=f"{kind} {name}",
        axes={"moe_runner_backend": "triton"},
        why="test",
        timeout_s=60.0,
        arms=("untuned", "tuned"),
        pool="gpu",
        model="tiny",
        family="kernel" if kind == "kernel-bench" else "serving",
    )
    return replace(base, **changes)


def plan(cells: Sequence[PlannedCell], compare: ComparePolicy | None = None, **gate: Any) -> Plan:
    return Plan(
        name="test",
        matrix="",
        matrix_digest="",
        created="2026-01-01T00:00:00Z",
        version="0",
        cells=tuple(cells),
        pools=(),
        models=(),
        arms=(),
        images=(),
        compare=compare or ComparePolicy("untuned", "tuned"),
        gate=GatePolicy(**gate),
    )


def launch(arm: str, pair: int, order: int, stage: str, values: dict[str, float], **changes: Any) -> Launch:
    """One launch; the first metric is primary. `name` ends in _ms or _us: lower is better."""
    samples = tuple(
        Samples(
            metric=name,
            unit="x",
            better="lower" if name.endswith(("_ms", "_us")) or name.startswith("kernel_time") else "higher",
            values=(value,),
            primary=index == 0,
        )
        for index, (name, value) in enumerate(values.items())
    )
    base = Launch(
        device=DEVICE, started="", wall_s=1.0, samples=samples, arm=arm, pair=pair, order=order, stage=stage,  # type: ignore[arg-type]
        peak_memory_bytes=1000 if arm == "tuned" else 900,
    )  # fmt: skip
    return replace(base, **changes)


def stage(
    ratios: Sequence[float], name: str = "screen", arms: tuple[str, str] = ("untuned", "tuned"), metric: str = "tps"
) -> Measurement:
    """A stage whose pairs have exactly these log ratios candidate/baseline of a metric."""
    launches = []
    for turn in turns(len(ratios), name, ("A", "B")):
        value = 100.0 * (1 + 0.1 * turn.pair) * (np.exp(ratios[turn.pair]) if turn.arm == "B" else 1.0)
        arm = arms[0] if turn.arm == "A" else arms[1]
        launches.append(launch(arm, turn.pair, turn.order, name, {metric: float(value)}))
    return measurement(launches)


def measurement(launches: Sequence[Launch], **changes: Any) -> Measurement:
    base = Measurement(
        kind="serve", status="ok", device=DEVICE, environment={}, work={"requests": 1}, launches=tuple(launches)
    )
    return replace(base, **changes)


def wobble(center: float, count: int) -> list[float]:
    """`count` log ratios close around a centre, no two alike."""
    return [center + 0.001 * float(np.sin(i + 1)) for i in range(count)]


@pytest.fixture
def lab() -> SimpleNamespace:
    return SimpleNamespace(
        cell=cell, plan=plan, launch=launch, stage=stage, measurement=measurement, wobble=wobble, device=DEVICE
    )
