"""What a result that somebody sent may hold: it is compared in bounded time, or says why it cannot be."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moegate.records import Launch, Measurement, Samples
from moegate.records.plan import MOST_PAIRS
from orchestrator.compare import Pair, compare, predict
from orchestrator.compare.divergence import first_divergence
from orchestrator.compare.prediction import batch_sizes, kernel_times


def only(lab: SimpleNamespace, measured: Measurement, kind: str = "serve", **gate: object) -> object:
    cell = lab.cell("a", kind=kind)
    return compare(lab.plan([cell], **gate), {"a": [measured]}).cells[0]


@pytest.mark.parametrize("far", [1e-300, 1e300])
def test_a_metric_that_nobody_measures_is_no_effect(lab: SimpleNamespace, far: float) -> None:
    measured = lab.stage([0.01] * 5)
    launches = [
        replace(x, samples=(*x.samples, Samples("odd_ms", "ms", "lower", (far if x.arm == "tuned" else 1.0,))))
        for x in measured.launches
    ]
    verdict = only(lab, replace(measured, launches=tuple(launches)))
    assert verdict.verdict is not None  # type: ignore[attr-defined]
    assert verdict.others == ()  # type: ignore[attr-defined]


def test_metrics_without_end_are_not_estimated_without_end(lab: SimpleNamespace) -> None:
    odd = tuple(Samples(f"m{n}", "x", "lower", (1.0 + n,)) for n in range(20_000))
    measured = lab.stage([0.01, 0.011, 0.012, 0.013, 0.014])
    launches = tuple(replace(x, samples=(*odd[:10_000], *x.samples, *odd[10_000:])) for x in measured.launches)
    began = time.process_time()
    verdict = only(lab, replace(measured, launches=launches))
    assert verdict.effect.metric == "tps"  # type: ignore[attr-defined]
    assert len(verdict.others) < 500  # type: ignore[attr-defined]
    assert time.process_time() - began < 20.0


def test_more_pairs_than_a_plan_may_ask_for_are_no_verdict(lab: SimpleNamespace) -> None:
    assert only(lab, lab.stage([0.01] * MOST_PAIRS)).verdict is not None  # type: ignore[attr-defined]
    verdict = only(lab, lab.stage([0.01] * (MOST_PAIRS + 1)))
    assert (verdict.verdict, verdict.reason) == (None, "501 pairs of a stage: at most 500 are compared")  # type: ignore[attr-defined]


def pair_of(launch: Launch) -> Pair:
    return Pair("screen", 0, launch, launch)


def test_batch_sizes_that_are_none_are_left_out(lab: SimpleNamespace) -> None:
    sizes = {"1": 3, "x": 9, "-4": 1, "9" * 5000: 1, "²": 1, "8": -2, "0": 1, "16": 1}
    launch = replace(lab.launch("a", 0, 0, "screen", {"tps": 1.0}), batch_sizes=sizes)
    assert batch_sizes([pair_of(launch)]) == {1: 6, 16: 2}


def test_many_batch_sizes_are_set_against_many_times_at_once(lab: SimpleNamespace) -> None:
    names = {f"kernel_time_us_{m}": 1.0 + m for m in range(1, 4001)} | {"kernel_time_" + "9" * 5000: 1.0}
    pairs = [pair_of(lab.launch("a", 0, 0, "screen", names))] * 3
    began = time.process_time()
    times = kernel_times(pairs)
    assert len(times) == 4000
    seen = dict.fromkeys(range(1, 200_001), 1)
    found = predict(times, seen)
    assert found is not None
    assert found.exact == pytest.approx(0.02)
    assert time.process_time() - began < 20.0


def test_the_nearest_timed_batch_size_is_taken_and_of_two_the_smaller() -> None:
    times = {4: (4.0, 1.0), 8: (8.0, 1.0), 16: (16.0, 1.0)}
    for size, nearest in ((1, 4), (4, 4), (6, 4), (7, 8), (12, 8), (13, 16), (1000, 16)):
        found = predict(times, {size: 1})
        assert found is not None
        assert found.gain == pytest.approx(nearest - 1.0)


def test_a_saving_of_almost_all_of_a_step_predicts_nothing() -> None:
    assert predict({1: (10.0, 5.0)}, {1: 1}, layers=1, tpot_us=5.0 + 1e-300) is None
    assert predict({1: (10.0, 5.0)}, {1: 1}, layers=1, tpot_us=10.0) is not None


def test_answers_and_scores_beyond_any_number_are_none(lab: SimpleNamespace) -> None:
    huge = {"answers": {"a": {"tokens": [10**400], "text": "x", "logprobs": [10**400]}}}
    other = {"answers": {"a": {"tokens": [1], "text": "y", "logprobs": [0.5]}}}
    found = first_divergence(huge, other)
    assert found is not None
    assert found.unit == "character"
    launches = [
        replace(lab.launch(arm, 0, order, "screen", {"exact_match": 0.5}), detail={"scores": {"s": 10**400}})
        for order, arm in enumerate(("untuned", "tuned"))
    ]
    verdict = only(lab, lab.measurement(launches), kind="accuracy")
    assert verdict.verdict is None  # type: ignore[attr-defined]
    assert verdict.reason == "a launch without scores per sample"  # type: ignore[attr-defined]
