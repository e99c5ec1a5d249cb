"""Runs made from the record types: a small one with every outcome, hostile text everywhere, and large ones."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

from moegate.records import (
    ArmSpec,
    Case,
    CellOutcome,
    CellVerdict,
    ComparePolicy,
    Comparison,
    GatePolicy,
    GateReason,
    GateResult,
    Interaction,
    Measurement,
    ModelSpec,
    Plan,
    PlannedCell,
    PoolSpec,
    QuarantineRule,
    RunBundle,
    ShellLine,
    TrendPoint,
)
from tests.unit.reports.pieces import (
    CPU,
    FILE,
    TUNED,
    Arms,
    cell,
    effect_of,
    launches_of,
    measured,
    outcome,
)


class Maker:
    """Collects cells with everything that belongs to them, then makes the bundle."""

    def __init__(self, seed: int = 7) -> None:
        self.rng = Random(seed)
        self.cells: list[PlannedCell] = []
        self.outcomes: list[CellOutcome] = []
        self.verdicts: list[CellVerdict] = []
        self.measurements: dict[str, tuple[Measurement, ...]] = {}

    def plain(self, cell_: PlannedCell, cases: tuple[Case, ...] = (), **more: Any) -> None:
        """Add a cell without arms."""
        self.cells.append(cell_)
        self.outcomes.append(outcome(cell_, **more))
        self.measurements[cell_.id] = (measured(cell_, cases=cases),)

    def compared(
        self, cell_: PlannedCell, verdict: str, shift: float, sd: float, pairs: Arms = (3, 8), **more: Any
    ) -> None:
        """Add a cell with two arms; `shift` and `sd` are of the signed log ratio per pair."""
        screen = [self.rng.gauss(shift, sd) for _ in range(int(pairs[0]))]
        confirm = [self.rng.gauss(shift, sd) for _ in range(int(pairs[1]))]
        launches = launches_of(cell_, screen, confirm, self.rng)
        void = int(more.pop("void", 0))
        launches = tuple(
            dataclasses.replace(launch, void_reason="2 of 4 requests failed") if i < void else launch
            for i, launch in enumerate(launches)
        )
        self.cells.append(cell_)
        self.outcomes.append(outcome(cell_, stages=2 if confirm else 1, log="ready after 3.1 s\nshut down cleanly\n"))
        self.measurements[cell_.id] = (measured(cell_, launches),)
        others = (effect_of(screen, cell_.kind, metric="median_tpot_ms"),) if cell_.kind == "serve" else ()
        reason = more.pop("reason", f"{len(screen)} screening and {len(confirm)} fresh pairs against a margin of 1.0 %")
        self.verdicts.append(
            CellVerdict(
                cell=cell_.id,
                label=cell_.label,
                kind=cell_.kind,
                family=cell_.family or "serving",
                verdict=verdict,  # type: ignore[arg-type]
                reason=reason,
                control=cell_.control,
                aa=cell_.aa,
                effect=effect_of(confirm or screen, cell_.kind),
                others=others,
                log_ratios_screen=tuple(screen),
                log_ratios_confirm=tuple(confirm),
                p=2.0 ** -len(confirm) if confirm else None,
                threshold=0.004,
                detectable=0.01 + 2.2 * sd / math.sqrt(max(len(confirm), 3)),
                void_launches=void,
                device=CPU.identity,
                peak_memory={"untuned": 900 << 20, "tuned": 940 << 20},
                **more,
            )
        )

    def bundle(self, gate: GateResult, **more: Any) -> RunBundle:
        """Return the run."""
        comparison = Comparison(
            cells=tuple(self.verdicts),
            interactions=more.pop("interactions", ()),
            aa_cells=sum(c.aa for c in self.cells),
            aa_flagged=0,
            aa_upper=0.95 if any(c.aa for c in self.cells) else None,
            notes=("auto on cpu resolves to torch: its config lookup is not reachable",),
        )
        plan = Plan(
            name="default",
            matrix="matrix.yaml",
            matrix_digest="9f2c" * 16,
            created="2026-11-29T13:58:00Z",
            version="0.1.0",
            cells=tuple(self.cells),
            pools=(PoolSpec("cpu", "cpu", slots=1),),
            models=(ModelSpec("tiny-moe", "examples/models/tiny-moe/config.json", "ab" * 32, dtype="float32"),),
            arms=(ArmSpec("untuned"), ArmSpec("tuned", configs="tuned", env={"MOEGATE_LOG": "info"})),
            images=(),
            compare=ComparePolicy("untuned", "tuned", expect="improved", screen=3, confirm=8, futility=None),
            gate=more.pop("policy", GatePolicy(metric={"serve": "output_throughput"})),
            warnings=("pool cpu: Docker does not answer, cells run as processes",),
        )
        return RunBundle(
            plan=plan,
            outcomes=tuple(self.outcomes),
            measurements=self.measurements,
            comparison=comparison,
            gate=gate,
            config_files={FILE: {str(m): config for m, config in TUNED.items()}},
            commands={
                c.id: tuple(ShellLine(arm, f"tuner bench '{c.id}' {arm}") for arm in dict.fromkeys(c.arms or ("",)))
                for c in self.cells
            },
            environment={"os": "Linux 6.1", "cpu": "AMD EPYC 9654", "python": "3.11.2", "torch": "2.13.0+cpu"},
            started="2026-11-29T13:58:04Z",
            finished="2026-11-29T14:02:41Z",
            **more,
        )


def make_green() -> RunBundle:
    """The default matrix on a CPU: tuning helps triton, the control stands still, the gate passes."""
    made = Maker()
    made.plain(
        cell("0c11aa02", "check", "check tiny-moe", pool=None), tuple(Case(f"rule {r}", "passed") for r in "abc")
    )
    cases = tuple(
        Case(f"fused_experts {dtype} M={m}", "passed", f"max-rel {m * 1e-7:.1e}")
        for dtype in ("float32",)
        for m in (1, 2, 33)
    )
    made.plain(
        cell("7e1042bd", "kernel-test", "kernel-test fused_experts float32", axes={"ops": "fused_experts"}), cases
    )
    made.plain(cell("51d2f0aa", "tune", "tune tiny-moe fused_experts float32", axes={"effort": "quick"}))
    bench = cell(
        "b3709e44",
        "kernel-bench",
        "kernel-bench fused_experts triton eager",
        axes={"moe_runner_backend": "triton", "batch_sizes": [1, 2, 4]},
    )
    made.compared(bench, "improved", 1.05, 0.02)
    load = {"requests": 4, "concurrency": 2, "input": 16, "output": 8, "seed": 42}
    triton = cell(
        "e0c44f19",
        "serve",
        "serve tiny-moe triton eager",
        axes={"moe_runner_backend": "triton", "graph": "eager", "load": load},
    )
    auto = cell(
        "a91b7c30",
        "serve",
        "serve tiny-moe auto eager",
        control=True,
        axes={"moe_runner_backend": "auto", "graph": "eager", "load": load},
    )
    made.compared(triton, "improved", 0.47, 0.02, predicted=0.64)
    made.compared(auto, "equivalent", 0.001, 0.009)
    aa = cell("d4d4c3c0", "serve", "serve tiny-moe triton eager A/A", aa=True, axes={"moe_runner_backend": "triton"})
    made.compared(dataclasses.replace(aa, arms=("untuned", "untuned")), "equivalent", 0.0, 0.01)
    gate = GateResult(
        0,
        "The tuned arm improves every cell that it can reach, and the control stands still.",
        (),
        {"improved": 2, "equivalent": 2},
    )
    square = Interaction(
        "serve tiny-moe eager", "serve", {"triton": "e0c44f19", "auto": "a91b7c30"}, 0.468, 0.446, 0.489
    )
    history = tuple(
        TrendPoint(f"run-{i}", f"2026-11-{10 + i}T10:00:00Z", 0.55 + 0.01 * (i % 3), 0.52, 0.6, "improved")
        for i in range(9)
    )
    return made.bundle(gate, interactions=(square,), history={"e0c44f19": history})


def make_red(text: str = "") -> RunBundle:
    """A run with every outcome; `text` is planted in every field that can carry text."""
    made = Maker(11)
    made.plain(
        cell("00000001", "check", f"check tiny-moe{text}"),
        (Case(f"bad-value{text}", "failed", f"E=8.json:3 num_warps 3{text}"),),
        state="FAILED", reason=f"1 error{text}", log=f"boom{text}\n",
    )  # fmt: skip
    _red_verdicts(made, text)
    _red_ends(made, text)
    gate, more = _red_gate(text)
    bundle = made.bundle(gate, **more)
    return _everywhere(bundle, text) if text else bundle


def _red_verdicts(made: Maker, text: str) -> None:
    """Cells 2 to 5 and 12, which were measured: identifier, kind, label and fields; verdict, shift, spread and more."""
    triton, auto = ({"moe_runner_backend": name} for name in ("triton", "auto"))
    worse = {"void": 2, "reason": f"worse{text}", "predicted": -0.1}
    told = {"axes": {**triton, f"x{text}": text}, "why": f"matrix line 20{text}"}
    rows: tuple[tuple[tuple[str, str, str], dict[str, Any], tuple[str, float, float], dict[str, Any]], ...] = (
        (("02", "serve", f"serve tiny-moe triton eager{text}"), told, ("regressed", -0.12, 0.02), worse),
        (("03", "serve", "serve tiny-moe auto eager"), {"axes": auto, "control": True}, ("equivalent", 0.0, 0.006), {}),
        (("04", "kernel-bench", "kernel-bench fused_experts triton"), {"axes": triton}, ("inconclusive", 0.02, 0.05),
         {"more_pairs": 14}),
        (("05", "serve", "serve tiny-moe triton full"), {"axes": triton}, ("improved", 0.05, 0.01), {}),
        (("12", "serve", "serve flaky-moe triton"), {"axes": triton}, ("regressed", -0.05, 0.02), {}),
    )  # fmt: skip
    for (number, kind, label), fields, came_to, more in rows:
        made.compared(cell(f"000000{number}", kind, label, **fields), *came_to, **more)


def _red_ends(made: Maker, text: str) -> None:
    """Cells 6 to 11 and 13, which came to no result."""
    for number, state in enumerate(("OOM", "TIMEOUT", "CRASHED", "INFRA_ERROR", "BLOCKED"), 6):
        one = cell(f"{number:08}", "serve", f"serve big-moe triton {state.lower()}")
        made.cells.append(one)
        made.outcomes.append(
            outcome(one, state=state, reason=f"{state.lower()} after 12 s{text}", log=f"Traceback{text}\n" * 3)
        )
    made.cells.append(cell("00000011", "serve", "serve big-moe never started"))
    made.cells.append(cell("00000013", "serve", "serve flaky-moe full"))
    made.outcomes.append(CellOutcome("00000013", "FAILED", f"quarantined{text}"))


def _red_gate(text: str) -> tuple[GateResult, dict[str, Any]]:
    """The gate's answer, and what else of the bundle speaks of these cells."""
    reasons = (
        GateReason(3, f"planned, but never measured{text}", "00000011"),
        GateReason(1, f"output_throughput fell by 11.3 %{text}", "00000002"),
        GateReason(0, "2 cells are quarantined"),
    )
    rules = (QuarantineRule("serve flaky-moe*", f"hangs on driver 1.2{text}", "2027-01-31"),)
    pair = {"triton": "00000002", "auto": "00000003"}
    return GateResult(1, f"1 cell regressed, 4 failed and 3 have no verdict{text}.", reasons, {"regressed": 1}), {
        "interactions": (Interaction(f"serve tiny-moe eager{text}", "serve", pair, -0.12, -0.14, -0.1),),
        "policy": GatePolicy(
            metric={"serve": f"output_throughput{text}"}, required=("serve tiny-moe*",), quarantine=rules
        ),
        "notes": (f"note{text}",),
    }


def _everywhere(bundle: RunBundle, text: str) -> RunBundle:
    """The same with `text` in the names and words around the cells too."""
    return dataclasses.replace(
        bundle,
        plan=dataclasses.replace(bundle.plan, name=f"default{text}", matrix=f"m.yaml{text}", warnings=(text,)),
        environment={f"os{text}": f"Linux{text}"},
        commands={
            key: tuple(ShellLine(x.arm + text, x.line + text) for x in typed) for key, typed in bundle.commands.items()
        },
        comparison=dataclasses.replace(bundle.comparison, notes=(text,), voided_pools={f"cpu{text}": text}),
    )


def make_many(cells: int, seed: int = 3) -> RunBundle:
    """A large A/A-like run: mostly equivalent, 7 pairs per cell on average, some of every other outcome."""
    made = Maker(seed)
    for number in range(cells):
        kind = ("serve", "kernel-bench")[number % 2]
        backend = ("triton", "auto")[number // 2 % 2]
        one = cell(
            f"{number:08x}",
            kind,
            f"{kind} model-{number // 8:04d} {backend} {('eager', 'full')[number // 4 % 2]}",
            axes={"moe_runner_backend": backend, "graph": "eager", "engine": "moegate"},
        )
        verdict, shift, pairs = ("equivalent", 0.0, (5, 0))
        if number % 10 == 3:
            verdict, shift, pairs = ("inconclusive", 0.012, (5, 10))
        elif number % 25 == 7:
            verdict, shift, pairs = ("improved", 0.06, (5, 25))
        elif number % 60 == 41:
            verdict, shift, pairs = ("regressed", -0.04, (5, 25))
        made.compared(one, verdict, shift, 0.008, pairs)
    gate = GateResult(1, f"{cells // 60} of {cells} cells regressed.", (), {})
    return made.bundle(gate)
