"""`orchestrator gate` on run directories as the scheduler leaves them, and on itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moegate import records
from moegate.canonical import file_digest
from moegate.errors import UsageError
from moegate.journal import Journal
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
from orchestrator.commands import gate as command

DEVICE = DeviceIdentity(kind="cpu", name="cpu", identity="cpu:host")


def measurement(stage: str, ratio: float, pairs: int) -> Measurement:
    launches = []
    for number in range(pairs):
        for place, arm in enumerate(("a", "b") if number % 2 == 0 else ("b", "a")):
            value = 100.0 * (1 + ratio + 0.0001 * number if arm == "b" else 1.0)
            launches.append(
                Launch(
                    device=DEVICE,
                    started="",
                    wall_s=1.0,
                    arm=arm,
                    pair=number,
                    order=2 * number + place,
                    stage=stage,
                    samples=(Samples("tps", "tok/s", "higher", (value,), primary=True),),  # type: ignore[arg-type]
                )
            )
    return Measurement("serve", "ok", DEVICE, {}, {"requests": pairs}, launches=tuple(launches))


def write_run(folder: Path, ratio: float = 0.0, **policy: Any) -> Path:
    """A run of one serve cell and one check, with the journal of a scheduler."""
    cells = (
        PlannedCell("c1", "serve", "serve/tiny", {"moe_runner_backend": "triton"}, "", 60.0, arms=("a", "b"), pool="p"),
        PlannedCell("c2", "check", "check/tiny", {}, "", 60.0),
    )
    plan = Plan(
        name="t", matrix="", matrix_digest="", created="", version="", cells=cells, pools=(), models=(), arms=(),
        images=(), compare=ComparePolicy("a", "b", screen=5, confirm=8, futility=None), gate=GatePolicy(**policy),
    )  # fmt: skip
    folder.mkdir(parents=True)
    records.write(folder / "plan.json", plan)
    stages = [("screen", ratio, 5)] + ([("confirm", ratio, 8)] if ratio else [])
    with Journal.open(folder / "journal") as journal:
        journal.append("run", run="r1")
        for number, (stage, value, pairs) in enumerate(stages, start=1):
            result = folder / "cells" / "c1" / f"attempt-{number}" / "result.json"
            journal.append("lease", cell="c1", attempt=number, stage=stage)
            records.write(result, measurement(stage, value, pairs))
            journal.append(
                "done", cell="c1", attempt=number, state="PASSED", result=str(result.relative_to(folder)),
                sha256=file_digest(result),
            )  # fmt: skip
        journal.append("final", cell="c1", state="PASSED")
        journal.append("final", cell="c2", state="PASSED")
    return folder


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["gate", *arguments])


def test_a_still_run_passes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    got = invoke(str(run))
    assert got.exit_code == 0
    assert got.stdout.startswith("PASS: 2 cells (1 equivalent, 1 passed)")
    document = json.loads(invoke(str(run), "--json").stdout)
    assert document["exit"] == 0
    assert document["policy"]["gate"]["margin"] == 0.01


def test_a_regression_is_exit_1_and_named(tmp_path: Path) -> None:
    got = invoke(str(write_run(tmp_path / "run", ratio=-0.05)))
    assert got.exit_code == 1
    assert "[1] c1: regressed, expected no_regression (tps -5.0 % [" in got.stdout


def test_a_lost_entry_of_the_journal_is_exit_3(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "journal").read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        (run / "journal").write_bytes(b"".join(lines[:kept]))
        assert invoke(str(run)).exit_code == 3, kept
    (run / "journal").unlink()
    assert invoke(str(run)).exit_code == 3


def test_a_changed_or_missing_result_is_exit_3(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = run / "cells" / "c1" / "attempt-1" / "result.json"
    text = result.read_text()
    result.write_text(text.replace("100.0", "101.0", 1))
    changed = invoke(str(run))
    assert (changed.exit_code, "was changed" in changed.stdout) == (3, True)
    result.unlink()
    missing = invoke(str(run))
    assert (missing.exit_code, "is missing" in missing.stdout) == (3, True)


def test_overrides(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    wide = replace(measurement("screen", 0.0, 5), launches=tuple(
        replace(x, samples=(replace(x.samples[0], values=(100.0 * (1 + 0.1 * ((x.order or 0) % 3)),)),))
        for x in measurement("screen", 0.0, 5).launches
    ))  # fmt: skip
    result = run / "cells" / "c1" / "attempt-1" / "result.json"
    with Journal.open(run / "journal") as journal:
        journal.append("lease", cell="c1", attempt=2, stage="screen")
        records.write(result, wide)
        (run / "cells/c1/attempt-2").mkdir()
        result = result.rename(run / "cells" / "c1" / "attempt-2" / "result.json")
        records.write(run / "cells" / "c1" / "attempt-1" / "result.json", measurement("screen", 0.0, 5))
        journal.append(
            "done",
            cell="c1",
            attempt=2,
            state="PASSED",
            result=str(result.relative_to(run)),
            sha256=file_digest(result),
        )
        journal.append("final", cell="c1", state="PASSED")
    assert invoke(str(run)).exit_code == 0
    assert "inconclusive" in invoke(str(run)).stdout
    assert invoke(str(run), "--inconclusive", "fail").exit_code == 4
    assert invoke(str(run), "--required", "serve/*").exit_code == 4
    assert invoke(str(run), "--required", "nothing*").exit_code == 3
    assert isinstance(invoke(str(run), "--inconclusive", "maybe").exception, UsageError)
    ignored = invoke(str(run), "--seed", "0").exception
    assert isinstance(ignored, UsageError)
    assert (ignored.field, ignored.message) == ("--seed", "counts only with --selftest")


@pytest.mark.parametrize("arguments", [
        [], ["--selftest", "x"], ["/no/such/run"], ["--selftest", "--cells=2"], ["--selftest", "--inconclusive=fail"],
        ["--selftest", "--required=*"],
    ],
)  # fmt: skip
def test_wrong_command_lines(arguments: list[str]) -> None:
    assert isinstance(invoke(*arguments).exception, UsageError)


def test_the_selftest_prints_the_contract_s_document() -> None:
    arguments = ["--selftest", "--cells=50", "--runs=10", "--sd=0.01", "--shift=0.03", "--shifted=5"]
    got = invoke(*arguments, "--outliers=0.05", "--seed=4", "--json")
    assert got.exit_code == 0
    document = json.loads(got.stdout)
    assert list(document) == ["false_alarm_runs", "runs", "power", "mean_pairs_per_cell"]
    assert document["runs"] == 10
    assert document["power"] > 0.9
    text = invoke(*arguments).stdout
    assert "of 10 A/A runs" in text
