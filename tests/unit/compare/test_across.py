"""Two runs side by side: an answer where it is honest, a reason everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import DeviceIdentity, Measurement, ModelSpec, Plan, Proof
from moegate.stats import two_sample_p
from orchestrator.commands import compare as command
from orchestrator.compare.across import CONDITIONS, compare_runs

PROOF = Proof(
    engine="moegate", requested_backend="triton", resolved_backend="triton", configs_digest="d", kernel_hash="k"
)
MODEL = ModelSpec(name="tiny", config="/c", digest="m")


def proven(measurement: Measurement, **launch: Any) -> Measurement:
    changes = {"proof": PROOF, "detail": {"sequence_sha256": "s"}} | launch
    return replace(
        measurement,
        environment={"torch": "2.13.0", "moegate": "1"},
        launches=tuple(replace(x, **changes) for x in measurement.launches),
    )


def run(lab: SimpleNamespace, center: float, confirm: float | None = None, cell: Any = None) -> SimpleNamespace:
    plan = replace(lab.plan([cell or lab.cell("c")]), models=(MODEL,))
    stages = [proven(lab.stage(lab.wobble(center, 5)))]
    if confirm is not None:
        stages.append(proven(lab.stage(lab.wobble(confirm, 60), "confirm")))
    return SimpleNamespace(plan=plan, measurements={"c": tuple(stages)})


def test_the_candidate_that_got_worse_is_found(lab: SimpleNamespace) -> None:
    a, b = run(lab, 0.10, 0.10), run(lab, 0.05, 0.05)
    (verdict,) = compare_runs(a, b).cells
    assert verdict.verdict == "regressed"
    assert verdict.change == pytest.approx(np.expm1(-0.05), abs=1e-3)
    assert verdict.low <= verdict.change <= verdict.high  # type: ignore[operator]
    assert verdict.pairs == (60, 60)
    assert compare_runs(b, a).cells[0].verdict == "improved"
    assert command.exit_of(compare_runs(a, b)) is Exit.REGRESSION


def test_the_same_candidate_is_equivalent(lab: SimpleNamespace) -> None:
    result = compare_runs(run(lab, 0.1, 0.1), run(lab, 0.1, 0.1))
    assert result.cells[0].verdict == "equivalent"
    assert command.exit_of(result) is Exit.OK


def test_few_pairs_stay_inconclusive(lab: SimpleNamespace) -> None:
    loud = run(lab, 0.1)
    loud.measurements = {"c": (proven(lab.stage([0.05, 0.2, 0.1, 0.12, 0.07])),)}
    assert compare_runs(run(lab, 0.1), loud).cells[0].verdict == "inconclusive"


def edit(change: Callable[[Measurement], Measurement]) -> Callable[[SimpleNamespace], None]:
    def apply(bundle: SimpleNamespace) -> None:
        bundle.measurements = {"c": tuple(change(m) for m in bundle.measurements["c"])}

    return apply


def edit_launches(**changes: Any) -> Callable[[SimpleNamespace], None]:
    return edit(lambda m: replace(m, launches=tuple(replace(x, **changes) for x in m.launches)))


def edit_plan(change: Callable[[Plan], Plan]) -> Callable[[SimpleNamespace], None]:
    def apply(bundle: SimpleNamespace) -> None:
        bundle.plan = change(bundle.plan)

    return apply


def device(**changes: str) -> DeviceIdentity:
    return replace(DeviceIdentity(kind="cuda", name="NVIDIA H200", identity="GPU-1"), **changes)  # type: ignore[arg-type]


def slower_metric(m: Measurement) -> Measurement:
    launches = tuple(replace(x, samples=tuple(replace(s, metric="other") for s in x.samples)) for x in m.launches)
    return replace(m, launches=launches)


SPOILERS: dict[str, tuple[str, Callable[[SimpleNamespace], None]]] = {
    "another device": ("the devices", edit_launches(device=device(identity="GPU-2"))),
    "another driver": ("the device facts", edit_launches(device=device(driver="2"))),
    "another torch": ("the environments", edit(lambda m: replace(m, environment={"torch": "2.14.0"}))),
    "a code-generation variable": (
        "the environments",
        edit(lambda m: replace(m, environment=m.environment | {"TRITON_X": "1"})),
    ),
    "another clock policy": ("the hosts", edit(lambda m: replace(m, detail={"host": {"governor": "powersave"}}))),
    "another model": ("the models", edit_plan(lambda p: replace(p, models=(replace(MODEL, digest="n"),)))),
    "another load": ("the loads", edit_launches(detail={"sequence_sha256": "t"})),
    "another baseline": ("the baselines", edit_launches(proof=replace(PROOF, kernel_hash="x"))),
    "the interpreter": (
        "the use of Triton's interpreter",
        edit(lambda m: replace(m, interpreter=True)),
    ),
    "another metric": ("the metrics", edit(slower_metric)),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_what_is_not_honest_is_refused(lab: SimpleNamespace, name: str) -> None:
    says, spoil = SPOILERS[name]
    a, b = run(lab, 0.1), run(lab, 0.1)
    spoil(b)
    (verdict,) = compare_runs(a, b).cells
    assert verdict.verdict is None
    assert verdict.reason.startswith(f"{says} differ: ")
    assert command.exit_of(compare_runs(a, b)) is Exit.USAGE


def test_every_condition_has_a_spoiler() -> None:
    assert {says for says, _ in SPOILERS.values()} == set(CONDITIONS)


def test_our_own_version_may_differ(lab: SimpleNamespace) -> None:
    a, b = run(lab, 0.1), run(lab, 0.1)
    edit(lambda m: replace(m, environment=m.environment | {"moegate": "2"}))(b)
    assert compare_runs(a, b).cells[0].verdict is not None


def test_without_proof_or_verdict_it_is_refused(lab: SimpleNamespace) -> None:
    a, b = run(lab, 0.1), run(lab, 0.1)
    for bundle in (a, b):
        edit_launches(proof=None)(bundle)
    assert "proof" in compare_runs(a, b).cells[0].reason
    b.measurements = {}
    assert "run B has no verdict" in compare_runs(a, b).cells[0].reason


def test_cells_of_one_run_only_are_named(lab: SimpleNamespace) -> None:
    a = run(lab, 0.1)
    other = lab.cell("d")
    b = SimpleNamespace(plan=lab.plan([other]), measurements={})
    result = compare_runs(a, b)
    assert (result.cells, result.only_a, result.only_b) == ((), ("serve c",), ("serve d",))
    assert "no cell in common" in list(command.lines(result))[-1]


def test_two_sample_p_against_scipy() -> None:
    from scipy.stats import mannwhitneyu

    rng = np.random.default_rng(2)
    for n, m in ((5, 7), (60, 60), (90, 100)):
        a, b = rng.normal(0.02, 0.02, n), rng.normal(0, 0.02, m)
        method = "exact" if n * m <= 5000 else "asymptotic"
        expected = mannwhitneyu(a - 0.01, b, alternative="greater", method=method).pvalue
        assert two_sample_p(a, b, 0.01) == pytest.approx(expected, rel=1e-6)
    assert two_sample_p([0.0] * 5, [0.0] * 5, 0.0) == 1.0


def test_the_command(lab: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator import bundle

    runs = {"a": run(lab, 0.1, 0.1), "b": run(lab, 0.05, 0.05), "c": run(lab, 0.1)}
    edit_launches(device=device(identity="GPU-2"))(runs["c"])
    monkeypatch.setattr(bundle, "read_run", lambda path: runs[path.name])
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    got = CliRunner().invoke(app, ["compare", "a", "b", "--json"])
    document = json.loads(got.stdout)
    assert (got.exit_code, document["exit"]) == (1, 1)
    assert document["cells"][0]["verdict"] == "regressed"
    assert "regressed" in CliRunner().invoke(app, ["compare", "a", "b"]).stdout
    refused = CliRunner().invoke(app, ["compare", "a", "c"])
    assert isinstance(refused.exception, UsageError)
    assert "the devices differ" in refused.stdout
    refused = CliRunner().invoke(app, ["compare", "a", "c", "--json"])
    assert isinstance(refused.exception, UsageError), "standard error says why, whoever reads the document"
    assert json.loads(refused.stdout)["exit"] == 2
