"""Accuracy cells over identical samples, and predicted beside measured gains."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moegate.records import CellVerdict, DeviceIdentity, from_json, to_json
from moegate.stats import hodges_lehmann, one_sided_p
from moegate.stats.twosample import _null_pmf, shift
from orchestrator.compare import compare, predict


def accuracy(lab: SimpleNamespace, old: dict[str, object], new: dict[str, object]) -> object:
    cell = lab.cell("acc", kind="accuracy")
    launches = [
        replace(lab.launch(arm, 0, order, "screen", {"exact_match": 0.5}), detail={"scores": scores})
        for order, (arm, scores) in enumerate((("untuned", old), ("tuned", new)))
    ]
    return compare(lab.plan([cell]), {"acc": [lab.measurement(launches)]}).cells[0]


def scores(right: int, total: int) -> dict[str, object]:
    return {f"s{i}": int(i < right) for i in range(total)}


def test_identical_answers_pass_and_a_drop_fails(lab: SimpleNamespace) -> None:
    same = accuracy(lab, scores(700, 1000), scores(700, 1000))
    assert same.verdict == "equivalent"
    assert same.effect.gain == 0.0
    worse = accuracy(lab, scores(700, 1000), scores(670, 1000))
    assert worse.verdict == "regressed"
    assert worse.effect.gain == pytest.approx(-0.03)
    assert "30 lost" in worse.reason
    assert accuracy(lab, scores(700, 1000), scores(730, 1000)).verdict == "improved"
    assert accuracy(lab, scores(70, 100), scores(70, 100)).verdict == "inconclusive"


def test_where_the_answers_part_is_in_the_verdict(lab: SimpleNamespace) -> None:
    cell = lab.cell("acc", kind="accuracy")
    launches = [
        replace(
            lab.launch(arm, 0, order, "screen", {"accuracy": 0.5}),
            detail={"scores": scores(700, 1000), "answers": {"s1": {"tokens": [4, token], "logprobs": []}}},
        )
        for order, (arm, token) in enumerate((("untuned", 7), ("tuned", 9)))
    ]
    verdict = compare(lab.plan([cell]), {"acc": [lab.measurement(launches)]}).cells[0]
    assert verdict.verdict == "equivalent"
    assert (verdict.divergence.sample, verdict.divergence.position) == ("s1", 1)
    assert from_json(CellVerdict, json.loads(json.dumps(to_json(verdict)))) == verdict


def test_different_samples_are_refused(lab: SimpleNamespace) -> None:
    verdict = accuracy(lab, scores(5, 10), scores(5, 11))
    assert verdict.verdict is None
    assert "different samples" in verdict.reason


def test_the_same_ids_with_other_prompts_are_refused(lab: SimpleNamespace) -> None:
    cell = lab.cell("acc", kind="accuracy")
    launches = [
        replace(
            lab.launch(arm, 0, order, "screen", {"accuracy": 0.5}),
            stage=None,
            detail={"scores": scores(700, 1000), "input_sha256": inputs, "temperature_c": 40 * order},
        )
        for order, (arm, inputs) in enumerate((("untuned", "x"), ("tuned", "y")))
    ]
    verdict = compare(lab.plan([cell]), {"acc": [lab.measurement(launches)]}).cells[0]
    assert (verdict.verdict, "different inputs" in verdict.reason) == (None, True)
    same = [replace(x, detail=x.detail | {"input_sha256": "x"}) for x in launches]
    assert compare(lab.plan([cell]), {"acc": [lab.measurement(same)]}).cells[0].verdict == "equivalent"


@pytest.mark.parametrize("bad", [{}, {"s0": "yes"}, {"s0": 3}])
def test_unreadable_scores_are_refused(lab: SimpleNamespace, bad: dict[str, object]) -> None:
    assert accuracy(lab, bad, bad).verdict is None


def test_a_missing_arm_or_missing_scores_are_refused(lab: SimpleNamespace) -> None:
    cell = lab.cell("acc", kind="accuracy")
    alone = lab.launch("untuned", 0, 0, "screen", {"exact_match": 0.5})
    assert compare(lab.plan([cell]), {"acc": [lab.measurement([alone])]}).cells[0].verdict is None
    pair = [alone, lab.launch("tuned", 0, 1, "screen", {"exact_match": 0.5})]
    verdict = compare(lab.plan([cell]), {"acc": [lab.measurement(pair)]}).cells[0]
    assert verdict.reason == "a launch without scores per sample"


def test_prediction_weighs_by_the_steps_that_were_seen() -> None:
    times = {1: (10.0, 5.0), 64: (100.0, 100.0)}
    assert predict(times, {1: 9}).gain == pytest.approx(1.0)  # type: ignore[union-attr]
    assert predict(times, {64: 9}).gain == 0.0  # type: ignore[union-attr]
    mixed = predict(times, {1: 1, 64: 1})
    assert mixed is not None
    assert mixed.gain == pytest.approx(110 / 105 - 1)
    assert mixed.whole_step


def test_prediction_in_tpot_knows_the_rest_of_the_step() -> None:
    answer = predict({1: (10.0, 5.0)}, {1: 100}, layers=10, tpot_us=500.0)
    assert answer is not None
    assert answer.gain == pytest.approx(500 / 450 - 1)
    assert not answer.whole_step


def test_prediction_takes_the_nearest_batch_size_and_says_so() -> None:
    answer = predict({1: (10.0, 5.0), 4: (20.0, 20.0)}, {3: 1, 1: 3})
    assert answer is not None
    assert answer.exact == 0.75
    assert answer.gain == pytest.approx(50 / 35 - 1)


def test_no_prediction_without_a_ground() -> None:
    assert predict({}, {1: 1}) is None
    assert predict({1: (1.0, 1.0)}, {}) is None
    assert predict({1: (0.0, 1.0)}, {1: 1}) is None
    assert predict({1: (10.0, 1.0)}, {1: 1}, layers=100, tpot_us=500.0) is None


def test_kernel_cells_foretell_the_serving_cell(lab: SimpleNamespace) -> None:
    kernel = lab.cell("k", kind="kernel-bench", axes={"moe_runner_backend": "triton"})
    other = lab.cell("x", kind="kernel-bench", axes={"moe_runner_backend": "auto"}, control=True)
    serve = lab.cell("s")
    launches = {"k": [], "x": [], "s": []}
    for pair in range(5):
        for i in (0, 1):
            arm, order = ("untuned", "tuned")[i], 2 * pair + i
            fast = {"kernel_time_geomean": 50.0, "kernel_time_m2": (100.0, 80.0)[i], "kernel_time_m64": 500.0}
            launches["k"].append(lab.launch(arm, pair, order, "screen", fast))
            launches["x"].append(lab.launch(arm, pair, order, "screen", fast | {"kernel_time_m2": 1.0}))
            tpot = {"median_tpot_ms": 1.0}
            launches["s"].append(lab.launch(arm, pair, order, "screen", tpot, batch_sizes={"2": 30}))
    data = {name: [lab.measurement(found)] for name, found in launches.items()}
    got = {v.cell: v for v in compare(lab.plan([other, serve, kernel]), data, {"tiny": 10}).cells}
    assert got["s"].predicted == pytest.approx(1000 / 800 - 1)
    assert not got["s"].predicted_whole_step
    bound = {v.cell: v for v in compare(lab.plan([other, serve, kernel]), data).cells}
    assert (bound["s"].predicted, bound["s"].predicted_whole_step) == (pytest.approx(0.25), True)
    assert got["k"].predicted is None
    assert compare(lab.plan([serve, other]), data).cells[0].predicted is None


def test_on_a_cpu_only_the_ratio_of_the_kernels_counts(lab: SimpleNamespace) -> None:
    """A busy host while the server ran must not make the kernel look like a small part of its step."""
    kernel, serve = lab.cell("k", kind="kernel-bench"), lab.cell("s")
    cpu = DeviceIdentity("cpu", "cpu", "cpu:x")
    launches = {"k": [], "s": []}
    for pair in range(5):
        for i, arm in enumerate(("untuned", "tuned")):
            where = {"device": cpu, "batch_sizes": {"2": 8, "8": 1}}
            busy = (1.0, 3.0, 1.0, 4.0, 2.0)[pair] * (1.0, 1.1)[i]  # neighbours come and go, the ratio stays
            times = {"kernel_time_geomean": 1.0, "kernel_time_m2": (275e3, 71.4e3)[i] * busy}
            launches["k"].append(lab.launch(arm, pair, 2 * pair + i, "screen", times, **where))
            tpot = {"median_tpot_ms": (720.0, 187.0)[i]}
            launches["s"].append(lab.launch(arm, pair, 2 * pair + i, "screen", tpot, **where))
    data = {name: [lab.measurement(found)] for name, found in launches.items()}
    verdict = next(v for v in compare(lab.plan([serve, kernel]), data, {"tiny": 1}).cells if v.cell == "s")
    assert verdict.predicted == pytest.approx(250 / 71.4 - 1)
    assert verdict.predicted_whole_step


def test_the_shift_of_two_cells() -> None:
    from scipy.stats import mannwhitneyu

    rng = np.random.default_rng(1)
    a, b = rng.normal(0.3, 0.1, 9), rng.normal(0.0, 0.1, 7)
    estimate, interval = shift(a, b)
    assert interval.low < 0.3 < interval.high
    assert interval.low <= estimate <= interval.high
    assert interval.level >= 0.95
    # The interval holds exactly the shifts that the two-sided test keeps.
    inside = mannwhitneyu(a - interval.low - 1e-9, b, method="exact").pvalue
    outside = mannwhitneyu(a - interval.low + 1e-9, b, method="exact").pvalue
    assert inside > 0.05 - 1e-12
    assert outside <= 0.05


def test_the_null_of_two_samples_is_the_count() -> None:
    pmf = _null_pmf(2, 3)
    np.testing.assert_allclose(pmf * 10, [1, 1, 2, 2, 2, 1, 1])
    small = shift([1.0], [0.0])[1]
    assert (small.low, small.high, small.level) == (1.0, 1.0, 0.0)
    big = np.arange(100.0)
    assert shift(big + 5, big)[0] == 5.0


def test_stats_agree_on_sign() -> None:
    values = [0.02, 0.03, 0.04]
    assert float(hodges_lehmann(values)) > 0
    assert float(one_sided_p(values, 0.0)) < float(one_sided_p(values, 0.0, -1))
