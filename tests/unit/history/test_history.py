"""History: idempotent import, trends that break where the machine changed, baselines, and damaged files."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moegate.errors import InfraError, RecordError, UsageError
from moegate.records import (
    CellOutcome,
    CellVerdict,
    Comparison,
    DeviceIdentity,
    Effect,
    GatePolicy,
    GateResult,
    Launch,
    Measurement,
    Plan,
    PlannedCell,
    RunBundle,
)
from orchestrator.commands import history as command
from orchestrator.history import History, open_history
from orchestrator.remember import remember

CLASS = "cuda:NVIDIA H200"


def bundle(
    day: int, gain: float = 0.1, *, exit: int = 0, driver: str = "1", torch: str = "2.13", **env: str
) -> RunBundle:
    device = DeviceIdentity(kind="cuda", name="NVIDIA H200", identity="GPU-1", driver=driver)
    cell = PlannedCell("c1", "serve", "serve/tiny", {}, "", 60.0, arms=("a", "b"), pool="p")
    created = f"2026-01-{day:02}T00:00:00Z"
    plan = Plan(
        name="nightly", matrix="", matrix_digest="m", created=created, version="", cells=(cell,), pools=(), models=(),
        arms=(), images=(), compare=None, gate=GatePolicy(),
    )  # fmt: skip
    effect = Effect(
        metric="tps", unit="tok/s", better="higher", ratio=1 + gain, low=1.0, high=1.2, level=0.94, gain=gain,
        gain_low=gain - 0.01, gain_high=gain + 0.01, baseline_median=100.0, candidate_median=100 * (1 + gain), pairs=5,
    )  # fmt: skip
    verdict = CellVerdict(
        cell="c1", label="serve/tiny", kind="serve", family="serving", verdict="improved", reason="", effect=effect,
        device="GPU-1",
    )  # fmt: skip
    launch = Launch(device=device, started="", wall_s=1.0, arm="a", pair=0, order=0, stage="screen")
    measured = Measurement("serve", "ok", device, {"torch": torch, "moegate": str(day)}, {"requests": 1}, (launch,))
    return RunBundle(
        plan=plan,
        outcomes=(CellOutcome("c1", "PASSED"),),
        measurements={"c1": (measured,)},
        comparison=Comparison(cells=(verdict,)),
        gate=GateResult(exit=exit, sentence="PASS", reasons=(), counts={}),
        environment={"branch": "main", "revision": f"r{day}", "kernel": "6.1", **env},
        started=created,
        finished=created,
    )


@pytest.fixture
def history(tmp_path: Path) -> Any:
    with History(tmp_path / "h.sqlite") as opened:
        yield opened


def test_import_is_idempotent(history: History) -> None:
    assert history.add(bundle(1))
    assert not history.add(bundle(1))
    assert history.add(bundle(2))
    assert [row.revision for row in history.runs()] == ["r2", "r1"]
    assert len(history.cells(history.runs()[0])) == 1


def test_a_run_that_went_on_replaces_itself(history: History) -> None:
    history.add(bundle(1))
    assert history.add(bundle(1, gain=0.2))
    assert len(history.runs()) == 1
    assert [point.gain for point in history.trend("c1")] == [0.2]


def test_it_survives_closing_and_a_second_reader(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h.sqlite"
    with History(path) as one:
        one.add(bundle(1))
        with History(path) as two:
            assert not two.add(bundle(1))
            assert two.add(bundle(2))
        assert len(one.runs()) == 2
    with open_history(path) as again:
        assert len(again.runs(branch="main")) == 2
        assert again.runs(branch="other") == []
        assert len(again.runs(limit=1)) == 1


def test_a_trend_starts_anew_where_the_machine_changed(history: History) -> None:
    for day, driver in ((1, "1"), (2, "1"), (3, "2"), (4, "2")):
        history.add(bundle(day, gain=0.1 + day / 100, driver=driver))
    points = history.trend("serve/tiny")
    assert [point.gain for point in points] == pytest.approx([0.11, 0.12, 0.13, 0.14])
    assert [point.changed for point in points] == [None, None, "device.driver: 1 -> 2", None]
    assert history.trend("c1", device_class="cpu:cpu") == []
    assert len(history.trend("c1", branch="main", device_class=CLASS)) == 4


def test_code_generation_and_host_are_in_the_fingerprint_but_our_version_is_not(history: History) -> None:
    for made in (bundle(1), bundle(2), bundle(3, torch="2.14"), bundle(4, torch="2.14", kernel="6.2")):
        history.add(made)
    changes = [point.changed for point in history.trend("c1")]
    assert changes == [None, None, "torch: 2.13 -> 2.14", "host.kernel: 6.1 -> 6.2"]


def test_baselines_are_by_branch_and_class_and_lose_their_force(history: History) -> None:
    history.add(bundle(1))
    history.add(bundle(2, gain=0.2))
    history.add(bundle(3, gain=0.3, exit=1))
    history.add(bundle(4, gain=0.4), branch="topic")
    print_now = history.trend("c1", branch="main")[0].fingerprint
    best = history.baseline("c1", branch="main", device_class=CLASS, fingerprint=print_now)
    assert not isinstance(best, str)
    assert best.gain == 0.2
    changed = history.baseline("c1", branch="main", device_class=CLASS, fingerprint="other")
    assert isinstance(changed, str)
    assert "no longer valid" in changed
    assert isinstance(history.baseline("c1", branch="main", device_class="cpu:cpu", fingerprint=print_now), str)


def test_earlier_points_for_a_report(history: History) -> None:
    for day in range(1, 6):
        history.add(bundle(day, gain=day / 10))
    history.add(bundle(6, driver="9"))
    got = history.earlier(bundle(5))
    assert [point.gain for point in got["c1"]] == [0.1, 0.2, 0.3, 0.4]
    assert [point.gain for point in history.earlier(bundle(5), limit=2)["c1"]] == [0.3, 0.4]
    assert history.earlier(bundle(7, driver="10")) == {}


def test_a_cell_without_verdict_or_effect_is_kept(history: History) -> None:
    made = bundle(1)
    bare = replace(made.comparison.cells[0], verdict=None, effect=None)
    history.add(replace(made, comparison=Comparison(cells=(bare,)), measurements={}))
    (row,) = history.cells(history.runs()[0])
    assert (row.verdict, row.gain, row.device_class) == (None, None, "")
    assert history.earlier(made) == {}


def test_the_false_alarm_rate_over_all_runs(history: History) -> None:
    for day, verdict in enumerate(("equivalent", "inconclusive", "regressed", None), start=1):
        made = bundle(day)
        cell = replace(made.comparison.cells[0], aa=True, verdict=verdict)  # type: ignore[arg-type]
        history.add(replace(made, comparison=Comparison(cells=(cell,))))
    history.add(bundle(9))
    rate = history.aa_rate()
    assert (rate.events, rate.trials) == (1, 3)
    assert rate.low < 1 / 3 < rate.high
    assert history.aa_rate(branch="other").trials == 0
    left = sorted(history.aa_rate(without=run.id).trials for run in history.runs())
    assert left == [2, 2, 2, 3, 3], "a run without a judged A/A cell takes none away"


def test_hostile_text_is_data(history: History) -> None:
    history.add(bundle(1), branch="x'; DROP TABLE runs; --", path='"')
    assert history.runs()[0].branch == "x'; DROP TABLE runs; --"
    assert history.trend("' OR 1=1 --") == []


def test_a_run_remembers_itself_and_gets_its_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOEGATE_HISTORY", "GITHUB_HEAD_REF", "GITHUB_REF_NAME", "GITHUB_SHA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "runs").mkdir()
    assert remember(bundle(1), tmp_path / "runs" / "a").history == {}
    later = remember(bundle(2), tmp_path / "runs" / "b")
    assert [point.gain for point in later.history["c1"]] == [0.1]
    with open_history(tmp_path / "runs" / "history.sqlite") as history:
        assert {row.branch for row in history.runs()} == {""}
    assert remember(bundle(3), tmp_path / "elsewhere" / "c") == bundle(3)
    assert not (tmp_path / "elsewhere").exists()

    monkeypatch.setenv("MOEGATE_HISTORY", str(tmp_path / "all.sqlite"))
    monkeypatch.setenv("GITHUB_HEAD_REF", "topic")
    remember(bundle(4), tmp_path / "elsewhere" / "d")
    with open_history(tmp_path / "all.sqlite") as history:
        assert history.runs()[0].branch == "topic"
    monkeypatch.setenv("GITHUB_HEAD_REF", "other")
    remember(bundle(4, exit=1), tmp_path / "elsewhere" / "d")
    with open_history(tmp_path / "all.sqlite") as history:
        assert [(row.branch, row.exit) for row in history.runs()] == [("topic", 1)]


def test_a_damaged_history_costs_a_note_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(b"nonsense" * 200)
    monkeypatch.setenv("MOEGATE_HISTORY", str(path))
    got = remember(bundle(1), tmp_path / "run")
    assert got.history == {}
    assert "not in the history" in got.notes[0]


def test_the_host_that_measured_is_in_the_fingerprint(history: History) -> None:
    for day, governor in ((1, "performance"), (2, "powersave")):
        made = bundle(day)
        measured = replace(made.measurements["c1"][0], detail={"host": {"governor": governor}})
        history.add(replace(made, measurements={"c1": (measured,)}))
    assert history.trend("c1")[1].changed == "host.governor: performance -> powersave"


@pytest.mark.parametrize(
    "content", [b"not a database, whatever its name says" * 40, b"SQLite format 3\0" + b"\1" * 100]
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="history"):
        History(path)
    assert path.read_bytes() == content


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    History(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(RecordError, match="schema 7"):
        History(path)


DAMAGE = {
    "no table": "DROP TABLE cells",
    "no column": "ALTER TABLE runs DROP COLUMN sentence",
    "facts are not JSON": "UPDATE cells SET facts = '{'",
    "facts are a list": "UPDATE cells SET facts = '[1]'",
    "a gain that is text": "UPDATE cells SET gain = 'abc'",
    "a gain without end": "UPDATE cells SET gain = 9e999",
    "bytes": "UPDATE runs SET started = x'ff00'",
    "not UTF-8": "UPDATE runs SET sentence = CAST(x'ff' AS TEXT)",
    "an exit that is text": "UPDATE runs SET exit = 'zz'",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
def test_damage_behind_a_whole_header_is_refused_and_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    path = tmp_path / "h.sqlite"
    with History(path) as history:
        history.add(bundle(1))
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()
    with pytest.raises(RecordError, match="damaged") as caught, History(path) as history:
        history.trend("c1")
    assert caught.value.file == str(path)
    monkeypatch.setenv("MOEGATE_HISTORY", str(path))
    note = remember(bundle(2), tmp_path / "run").notes[0]
    assert "not in the history" in note
    assert "damaged" in note


def test_a_history_that_another_process_holds_is_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.sqlite"
    History(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda file, **options: connect(file, **{**options, "timeout": 0.05}))
    with pytest.raises(InfraError, match="locked"):
        History(path)
    holder.close()


def test_a_full_disk_is_said_whatever_sqlite_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "h.sqlite"

    def fill() -> None:
        with History(path) as history:
            history._db.execute("PRAGMA max_page_count = 6")
            for day in range(1, 29):
                history.add(bundle(day), path="x" * 4000)

    with pytest.raises(InfraError, match="full"):
        fill()
    History(path).close()


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["history", *arguments])


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.commands import _conclude

    made = {f"run{day}": bundle(day, gain=day / 10, driver=str(day)) for day in (1, 2)}
    monkeypatch.setattr(_conclude, "bundle_of", lambda path: made[path.name])
    db = f"--db={tmp_path / 'h.sqlite'}"
    assert isinstance(invoke("list", db).exception, UsageError)
    assert [row["imported"] for row in json.loads(invoke("import", *made, db, "--json").stdout)] == [True, True]
    assert invoke("import", *made, db).stdout.count("already there") == 2
    listed = json.loads(invoke("list", db, "--json").stdout)
    assert [row["started"] for row in listed] == ["2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z"]
    shown = json.loads(invoke("show", listed[0]["id"][:8], db, "--json").stdout)
    assert shown["cells"][0]["gain"] == 0.2
    assert "+20.00 %" in invoke("show", listed[0]["id"], db).stdout
    text = invoke("trend", "serve/tiny", db).stdout
    assert "--- device.driver: 1 -> 2" in text
    assert len(json.loads(invoke("trend", "c1", db, "--json").stdout)) == 2
    assert isinstance(invoke("trend", "nothing", db).exception, UsageError)
    assert isinstance(invoke("show", "zz", db).exception, UsageError)


@pytest.mark.parametrize(
    ("verdict", "word"),
    [("equivalent", "control held"), ("inconclusive", "not shown to move"), ("regressed", "control moved")],
)
def test_controls_are_told_in_the_words_of_the_report(
    verdict: Any, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.commands import _conclude

    made = bundle(1)
    cells = tuple(replace(cell, verdict=verdict, control=True) for cell in made.comparison.cells)
    made = replace(made, comparison=replace(made.comparison, cells=cells))
    monkeypatch.setattr(_conclude, "bundle_of", lambda path: made)
    db = f"--db={tmp_path / 'h.sqlite'}"
    invoke("import", "run1", db)
    assert word in invoke("trend", "c1", db).stdout


def test_a_folder_that_is_no_run_imports_nothing(tmp_path: Path) -> None:
    db = tmp_path / "h.sqlite"
    assert isinstance(invoke("import", str(tmp_path / "none"), f"--db={db}").exception, UsageError)
    assert not db.exists()
