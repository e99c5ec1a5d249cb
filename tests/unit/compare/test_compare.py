"""Verdicts from records: the four verdicts, families, controls, and everything that must refuse one."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moegate.records import ComparePolicy, DeviceIdentity, from_json, to_json
from moegate.records.comparison import Comparison
from orchestrator.compare import compare


def one(lab: SimpleNamespace, measurements: list[object], cell: object = None, **gate: object) -> object:
    cell = cell or lab.cell("c")
    result = compare(lab.plan([cell], **gate), {"c": measurements})
    assert len(result.cells) == 1
    return result.cells[0]


def test_the_four_verdicts(lab: SimpleNamespace) -> None:
    wobble = lab.wobble
    cells = [lab.cell(name) for name in ("better", "worse", "same", "loud")]
    got = compare(
        lab.plan(cells),
        {
            "better": [lab.stage(wobble(0.05, 5)), lab.stage(wobble(0.05, 60), "confirm")],
            "worse": [lab.stage(wobble(-0.05, 5)), lab.stage(wobble(-0.03, 60), "confirm")],
            "same": [lab.stage(wobble(0.0, 5))],
            "loud": [lab.stage([0.03, -0.03, 0.005, -0.02, 0.02])],
        },
    )
    by_name = {verdict.cell: verdict for verdict in got.cells}
    assert {name: v.verdict for name, v in by_name.items()} == {
        "better": "improved",
        "worse": "regressed",
        "same": "equivalent",
        "loud": "inconclusive",
    }
    worse = by_name["worse"]
    assert worse.effect.pairs == 60  # the screen's pairs would overstate it
    assert worse.effect.gain == pytest.approx(np.expm1(-0.03), abs=0.0005)
    assert worse.effect.gain_low <= worse.effect.gain <= worse.effect.gain_high
    assert worse.effect.ratio == pytest.approx(np.exp(-0.03), abs=0.0005)
    assert len(worse.log_ratios_screen) == 5
    assert worse.p <= worse.threshold
    assert by_name["loud"].more_pairs > 0
    assert by_name["loud"].detectable > 0.01
    assert by_name["better"].peak_memory == {"untuned": 900, "tuned": 1000}
    assert from_json(Comparison, to_json(got)) == got


def test_lower_is_better_turns_the_sign(lab: SimpleNamespace) -> None:
    slower = [
        lab.stage(lab.wobble(0.05, 5), metric="tpot_ms"),
        lab.stage(lab.wobble(0.05, 60), "confirm", metric="tpot_ms"),
    ]
    verdict = one(lab, slower)
    assert verdict.verdict == "regressed"
    assert verdict.effect.ratio > 1
    assert verdict.effect.gain < 0
    assert verdict.log_ratios_screen[0] < 0


def test_the_policy_names_the_metric_that_gates(lab: SimpleNamespace) -> None:
    launches = []
    for pair in range(5):
        for order, arm in enumerate(("untuned", "tuned")):
            values = {"tps": 100.0 + pair, "ttft_ms": 10.0 * (1.0 if arm == "untuned" else 1.001)}
            launches.append(lab.launch(arm, pair, 2 * pair + order, "screen", values))
    verdict = one(lab, [lab.measurement(launches)], metric={"serve": "ttft_ms"})
    assert verdict.effect.metric == "ttft_ms"
    assert [effect.metric for effect in verdict.others] == ["tps"]
    missing = one(lab, [lab.measurement(launches)], metric={"serve": "speed"})
    assert missing.verdict is None
    assert "measured: tps, ttft_ms" in missing.reason


def test_no_result_no_verdict(lab: SimpleNamespace) -> None:
    assert one(lab, []).verdict is None
    assert one(lab, [lab.stage(lab.wobble(0.0, 4))]).reason == "4 of 5 screening pairs"
    failed = one(lab, [replace(lab.stage(lab.wobble(0.0, 5)), status="failed", failure="out of memory")])
    assert (failed.verdict, failed.reason) == (None, "out of memory")
    assert one(lab, [lab.measurement([])]).verdict is None


def test_cells_without_arms_do_not_appear(lab: SimpleNamespace) -> None:
    assert compare(lab.plan([lab.cell("c", kind="tune", arms=())]), {}).cells == ()


def test_a_screen_without_its_confirmation_is_never_a_direction(lab: SimpleNamespace) -> None:
    verdict = one(lab, [lab.stage(lab.wobble(-0.2, 5))])
    assert verdict.verdict == "inconclusive"
    assert "5 + 0 of 5 + 60" in verdict.reason


def test_a_device_offset_inside_one_cell_is_refused(lab: SimpleNamespace) -> None:
    """3 % between two devices, one arm on each: no numbers, no verdict."""
    other = DeviceIdentity(kind="cuda", name="NVIDIA H200", identity="GPU-2")
    measured = lab.stage(lab.wobble(-0.03, 5))
    moved = tuple(replace(x, device=other) if x.arm == "tuned" else x for x in measured.launches)
    verdict = one(lab, [replace(measured, launches=moved)])
    assert verdict.verdict is None
    assert "2 devices" in verdict.reason
    confirm = lab.stage(lab.wobble(-0.03, 60), "confirm")
    elsewhere = replace(confirm, launches=tuple(replace(x, device=other) for x in confirm.launches))
    assert one(lab, [measured, elsewhere]).verdict is None


def test_a_constant_device_offset_flags_nothing(lab: SimpleNamespace) -> None:
    """Cells spread over devices that differ by 3 %: each cell is paired on its own device."""
    rng = np.random.default_rng(1)
    cells, measured = [], {}
    for index in range(60):
        name = f"c{index}"
        device = DeviceIdentity(kind="cuda", name="NVIDIA H200", identity=f"GPU-{index % 4}")
        stages = [lab.stage(rng.normal(0, 0.01, 5)), lab.stage(rng.normal(0, 0.01, 60), "confirm")]
        offset = 1 + 0.03 * (index % 4 - 1.5)
        cells.append(lab.cell(name))
        measured[name] = [
            replace(
                stage,
                launches=tuple(
                    replace(
                        x, device=device, samples=tuple(replace(s, values=(s.values[0] * offset,)) for s in x.samples)
                    )
                    for x in stage.launches
                ),
            )
            for stage in stages
        ]
    got = compare(lab.plan(cells), measured)
    assert {v.verdict for v in got.cells} <= {"equivalent", "inconclusive"}


def test_void_launches_and_their_pairs_are_left_out_and_counted(lab: SimpleNamespace) -> None:
    measured = lab.stage(lab.wobble(0.0, 6))
    launches = list(measured.launches)
    launches[0] = replace(launches[0], void_reason="client lag")
    verdict = one(lab, [replace(measured, launches=tuple(launches))])
    assert verdict.verdict == "equivalent"
    assert len(verdict.log_ratios_screen) == 5
    assert verdict.void_launches == 2
    few = one(lab, [replace(measured, launches=tuple(launches[:10]))])
    assert few.verdict is None
    assert "2 launches void" in few.reason


def test_a_pair_that_was_run_again_counts_once(lab: SimpleNamespace) -> None:
    measured = lab.stage(lab.wobble(0.0, 5))
    again = [lab.launch(arm, 4, 10 + i, "screen", {"tps": 50.0}) for i, arm in enumerate(("untuned", "tuned"))]
    first = [replace(x, void_reason="throttled") if x.pair == 4 else x for x in measured.launches]
    verdict = one(lab, [replace(measured, launches=(*first, *again))])
    assert verdict.log_ratios_screen[4] == 0.0
    assert verdict.void_launches == 2


def test_covariates_void_a_pair(lab: SimpleNamespace) -> None:
    measured = lab.stage(lab.wobble(0.0, 6))
    hot = tuple(
        replace(x, detail={"temperature_c": 80 if x.pair == 2 and x.arm == "tuned" else 50}) for x in measured.launches
    )
    got = compare(lab.plan([lab.cell("c")]), {"c": [replace(measured, launches=hot)]})
    assert got.cells[0].void_launches == 2
    assert "15 degrees" in got.notes[0]


def test_launches_apart_in_time_are_no_pair(lab: SimpleNamespace) -> None:
    values = {"tps": 100.0}
    launches = [lab.launch("untuned", p, p, "screen", values) for p in range(5)]
    launches += [lab.launch("tuned", p, 5 + p, "screen", values) for p in range(5)]
    verdict = one(lab, [lab.measurement(launches)])
    assert verdict.verdict is None
    assert "next to it" in verdict.reason


def test_a_stage_measured_again_replaces_the_earlier_one(lab: SimpleNamespace) -> None:
    verdict = one(lab, [lab.stage(lab.wobble(0.5, 5)), lab.stage(lab.wobble(0.0, 5))])
    assert verdict.verdict == "equivalent"


def test_a_stranger_arm_and_nonsense_values_are_refused(lab: SimpleNamespace) -> None:
    assert "arm" in one(lab, [lab.stage(lab.wobble(0.0, 5), arms=("untuned", "other"))]).reason
    measured = lab.stage(lab.wobble(0.0, 5))
    zero = replace(measured.launches[3], samples=(replace(measured.launches[3].samples[0], values=(0.0,)),))
    launches = (*measured.launches[:3], zero, *measured.launches[4:])
    assert one(lab, [replace(measured, launches=launches)]).reason == "4 of 5 screening pairs, 2 launches void"
    none = tuple(replace(x, samples=(replace(x.samples[0], values=()),)) for x in measured.launches)
    assert "no positive value" in one(lab, [replace(measured, launches=none)]).reason
    loose = replace(measured.launches[0], pair=None)
    assert "without arm" in one(lab, [replace(measured, launches=(loose, *measured.launches[1:]))]).reason
    flipped = replace(measured.launches[0], samples=(replace(measured.launches[0].samples[0], better="lower"),))
    assert "direction" in one(lab, [replace(measured, launches=(flipped, *measured.launches[1:]))]).reason


def test_a_control_that_moves_voids_its_pool(lab: SimpleNamespace) -> None:
    cells = [
        lab.cell("tuned-cell"),
        lab.cell("auto", control=True, family="control", axes={"moe_runner_backend": "auto"}),
        lab.cell("elsewhere", pool="other"),
    ]
    moved = [lab.stage(lab.wobble(0.05, 5)), lab.stage(lab.wobble(0.05, 60), "confirm")]
    got = compare(lab.plan(cells), {c.id: moved for c in cells})
    by_name = {verdict.cell: verdict for verdict in got.cells}
    assert by_name["auto"].verdict == "improved"
    assert by_name["tuned-cell"].verdict is None
    assert "would have been improved" in by_name["tuned-cell"].reason
    assert by_name["elsewhere"].verdict == "improved"
    assert list(got.voided_pools) == ["gpu"]


def test_a_still_control_voids_nothing_and_makes_the_2x2(lab: SimpleNamespace) -> None:
    cells = [
        lab.cell("triton"),
        lab.cell("auto", control=True, family="control", axes={"moe_runner_backend": "auto"}),
    ]
    got = compare(
        lab.plan(cells),
        {
            "triton": [lab.stage(lab.wobble(0.5, 5)), lab.stage(lab.wobble(0.5, 60), "confirm")],
            "auto": [lab.stage(lab.wobble(0.0, 5))],
        },
    )
    assert [v.verdict for v in got.cells] == ["improved", "equivalent"]
    assert got.voided_pools == {}
    (interaction,) = got.interactions
    assert interaction.cells == {"triton": "triton", "auto": "auto"}
    assert interaction.low <= interaction.difference <= interaction.high
    assert interaction.difference == pytest.approx(0.5, abs=0.002)


def test_cells_that_differ_in_more_than_the_backend_are_no_2x2(lab: SimpleNamespace) -> None:
    cells = [
        lab.cell("a", axes={"moe_runner_backend": "triton", "graph": "full"}),
        lab.cell("b", axes={"moe_runner_backend": "auto", "graph": "eager"}, control=True),
    ]
    assert compare(lab.plan(cells), {c.id: [lab.stage(lab.wobble(0.0, 5))] for c in cells}).interactions == ()


def test_aa_cells_give_the_false_alarm_rate(lab: SimpleNamespace) -> None:
    cells = [lab.cell(f"aa{i}", aa=True, arms=("untuned", "untuned")) for i in range(4)]
    measured = {c.id: [lab.stage(lab.wobble(0.0, 5), arms=("untuned", "untuned"))] for c in cells}
    got = compare(lab.plan(cells), measured)
    assert (got.aa_cells, got.aa_flagged) == (4, 0)
    assert got.aa_upper == pytest.approx(1 - 0.05**0.25)
    assert {v.family for v in got.cells} == {"control"}
    single = compare(lab.plan([replace(cells[0], arms=("untuned",))]), {"aa0": measured["aa0"]})
    assert single.cells[0].verdict == "equivalent"


def test_an_aa_drift_cancels_though_the_arms_have_one_name(lab: SimpleNamespace) -> None:
    launches = [
        lab.launch("untuned", order // 2, order, "screen", {"tps": 100.0 * np.exp(0.0033 * order)})
        for order in range(10)
    ]
    verdict = one(lab, [lab.measurement(launches)], cell=lab.cell("c", aa=True, arms=("untuned",)))
    assert verdict.effect.gain == pytest.approx(0.0, abs=1e-12)


def test_families_pay_for_their_own_size_only(lab: SimpleNamespace) -> None:
    """Seven pairs reach 2^-7 <= q alone, not among ten screened cells; the other family does not count."""
    policy = ComparePolicy("untuned", "tuned", confirm=7, futility=None)
    moved = [lab.stage(lab.wobble(0.05, 5)), lab.stage(lab.wobble(0.05, 7), "confirm")]
    noise = [lab.stage(lab.wobble(0.05, 5)), lab.stage(lab.wobble(0.0, 7), "confirm")]
    kernels = [lab.cell(f"k{i}", kind="kernel-bench") for i in range(9)]
    crowd = [lab.cell(f"s{i}") for i in range(9)]
    serve = lab.cell("serve")
    data = {c.id: noise for c in kernels + crowd} | {"serve": moved}
    assert compare(lab.plan([serve, *kernels], policy), data).cells[0].verdict == "improved"
    assert compare(lab.plan([serve, *crowd], policy), data).cells[0].verdict == "inconclusive"


def test_a_tail_quantile_needs_its_requests(lab: SimpleNamespace) -> None:
    moved = [
        lab.stage(lab.wobble(0.5, 5), metric="p99_ttft_ms"),
        lab.stage(lab.wobble(0.5, 60), "confirm", metric="p99_ttft_ms"),
    ]

    def with_requests(each: int) -> list[object]:
        return [replace(m, launches=tuple(replace(x, detail={"completed": each}) for x in m.launches)) for m in moved]

    few = one(lab, with_requests(11))
    assert few.verdict == "inconclusive"
    assert "662" in few.reason
    assert one(lab, with_requests(12)).verdict == "regressed"


def test_ten_thousand_cells(lab: SimpleNamespace) -> None:
    rng = np.random.default_rng(3)
    cells = [lab.cell(f"c{i}") for i in range(10_000)]
    some = [[lab.stage(rng.normal(0, 0.01, 5))] for _ in range(50)]
    some += [[lab.stage(rng.normal(0.03, 0.01, 5)), lab.stage(rng.normal(0.03, 0.01, 60), "confirm")] for _ in range(2)]
    data = {c.id: some[i % len(some)] for i, c in enumerate(cells)}
    plan = lab.plan(cells)
    start = time.process_time()
    got = compare(plan, data)
    assert len(got.cells) == 10_000
    assert time.process_time() - start < 10.0
