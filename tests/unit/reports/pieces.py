"""The records that a run is made of: cells, launches, effects and outcomes, as short calls."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from moegate.records import (
    Attempt,
    Case,
    CellOutcome,
    ConfigUse,
    DeviceIdentity,
    Effect,
    Launch,
    Measurement,
    PlannedCell,
    Proof,
    Samples,
)

CPU = DeviceIdentity("cpu", "AMD EPYC 9654", "cpu:runner-07", arch="zen4", memory_bytes=24 << 30)
DEFAULT = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 32,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
TUNED = {
    1: {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 2,
    },
    2: {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 64,
        "GROUP_SIZE_M": 1,
        "num_warps": 4,
        "num_stages": 2,
    },
    4: {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": 64,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 8,
        "num_warps": 8,
        "num_stages": 3,
    },
}
FILE = "configs/triton_3_8_0/E=8,N=64,device_name=cpu,dtype=float32.json"
METRICS = {
    "serve": ("output_throughput", "tok/s", "higher", 4.1),
    "kernel-bench": ("kernel_time_geomean", "us", "lower", 84_000.0),
    "median_tpot_ms": ("median_tpot_ms", "ms", "lower", 241.0),
    "accuracy": ("exact_match", "", "higher", 0.81),
}


def effect_of(logs: list[float], kind: str, *, baseline: float | None = None, metric: str | None = None) -> Effect:
    """Build an effect whose gain is the mean of signed log ratios."""
    name, unit, better, start = METRICS[metric or kind]
    center = sum(logs) / len(logs)
    sd = max(0.004, (sum((x - center) ** 2 for x in logs) / len(logs)) ** 0.5)
    half = 2 * sd / math.sqrt(len(logs))
    sign = 1 if better == "higher" else -1
    base = start if baseline is None else baseline
    ends = sorted((math.exp(sign * (center - half)), math.exp(sign * (center + half))))
    return Effect(
        metric=name,
        unit=unit,
        better=better,  # type: ignore[arg-type]
        ratio=math.exp(sign * center),
        low=ends[0],
        high=ends[1],
        level=0.938,
        gain=math.expm1(center),
        gain_low=math.expm1(center - half),
        gain_high=math.expm1(center + half),
        baseline_median=base,
        candidate_median=base * math.exp(sign * center),
        pairs=len(logs),
    )


def proof_of(backend: str, tuned: bool, text: str = "") -> Proof:
    """Build the evidence of one launch."""
    resolved = "torch" if backend == "auto" else backend
    uses = tuple(
        ConfigUse(
            op="fused_experts",
            projection=projection,  # type: ignore[arg-type]
            batch_size=m,
            file=(FILE if projection == "up" else FILE.replace(".json", "_down.json")) if tuned else None,
            reason="exact" if tuned else "default",
            config=TUNED[m] if tuned else DEFAULT,
            calls=12 * m,
        )
        for projection in ("up", "down")
        for m in TUNED
    )
    chain = (
        {"backend": "triton", "chosen": resolved == "triton", "why": f"on cpu only where it is asked for{text}"},
        {"backend": "torch", "chosen": resolved == "torch", "why": "" if resolved == "triton" else "runs everywhere"},
    )
    return Proof(
        engine="moegate",
        requested_backend=backend,
        resolved_backend=resolved,
        chain=chain if backend == "auto" else chain[:1],
        configs=uses if resolved == "triton" else (),
        calls={resolved: 192},
    )


def launches_of(
    cell: PlannedCell, screen: list[float], confirm: list[float], rng: Random, text: str = ""
) -> tuple[Launch, ...]:
    """Build ABBA launches whose pairs have the given signed log ratios."""
    name, unit, better, start = METRICS[cell.kind]
    sign = 1 if better == "higher" else -1
    launches = []
    backend = str(cell.axes.get("moe_runner_backend", "triton"))
    for stage, logs in (("screen", screen), ("confirm", confirm)):
        for pair, log in enumerate(logs):
            level = start * math.exp(rng.gauss(0, 0.012))
            sides = (0, 1) if pair % 2 == 0 else (1, 0)
            for turn, side in enumerate(sides):
                middle = level * math.exp(sign * log * side)
                samples = [Samples(name, unit, better, (middle,), primary=True)]  # type: ignore[arg-type]
                if cell.kind == "serve":
                    itl = tuple(round(240 / middle * rng.lognormvariate(0, 0.2), 3) for _ in range(12))
                    samples.append(Samples("itl_ms", "ms", "lower", itl))
                launches.append(
                    Launch(
                        device=CPU,
                        started=f"2026-11-29T14:{2 * pair + turn:02d}:00Z",
                        wall_s=2.9 + side,
                        samples=tuple(samples),
                        proof=proof_of(backend, side == 1 and not cell.aa, text),
                        peak_memory_bytes=(900 + 40 * side) << 20,
                        batch_sizes={"1": 3, "2": 14} if cell.kind == "serve" else {},
                        arm=cell.arms[side],
                        pair=pair,
                        order=2 * pair + turn,
                        stage=stage,  # type: ignore[arg-type]
                        void_reason=None,
                        detail={"clock_mhz": 3100, "temperature_c": 61},
                    )
                )
    return tuple(launches)


def measured(cell: PlannedCell, launches: tuple[Launch, ...] = (), cases: tuple[Case, ...] = ()) -> Measurement:
    """Wrap launches or cases as a cell's result."""
    return Measurement(
        kind=cell.kind,
        status="ok",
        device=CPU,
        environment={"torch": "2.13.0+cpu", "triton": "3.8.0"},
        work={"requests": len(launches) or 1},
        launches=launches,
        cases=cases,
        interpreter=cell.kind in ("serve", "kernel-bench", "tune"),
    )


def cell(id_: str, kind: str, label: str, **more: Any) -> PlannedCell:
    """Build a planned cell; arms follow from the kind."""
    arms = ("untuned", "tuned") if kind in METRICS else ()
    family = {"serve": "serving", "accuracy": "serving", "kernel-bench": "kernel"}.get(kind)
    if more.get("control") or more.get("aa"):
        family = "control"
    base: dict[str, Any] = {"arms": arms, "family": family, "pool": "cpu", "model": "tiny-moe", "timeout_s": 600.0}
    base |= {"axes": {}, "why": f"kind {kind} of the matrix", **more}
    return PlannedCell(id=id_, kind=kind, label=label, **base)  # type: ignore[arg-type]


def outcome(cell_: PlannedCell, state: str = "PASSED", reason: str = "", log: str = "", stages: int = 1) -> CellOutcome:
    """Build a cell's outcome with one attempt per stage."""
    names = ("screen", "confirm") if stages == 2 else ("only",)
    attempts = tuple(
        Attempt(
            n + 1,
            stage,
            state,
            reason,
            started="2026-11-29T14:02:00Z",
            wall_s=41.2,
            device=CPU.identity,
            isolation="process",
        )  # type: ignore[arg-type]
        for n, stage in enumerate(names)
    )
    return CellOutcome(cell_.id, state, reason, attempts, log)  # type: ignore[arg-type]


Arms = tuple[float, float]
