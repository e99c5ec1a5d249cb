"""Whole runs through the real scheduler, with children that are real processes and quick."""

# ruff: noqa: E501 - edits read best on one line
import json
import re
import subprocess
from collections import Counter

import pytest

from moegate import journal
from moegate.canonical import file_digest
from moegate.errors import RunLocked, UsageError
from orchestrator.bundle import read_run
from orchestrator.commands._conclude import conclude
from orchestrator.commands.history import import_command
from orchestrator.history import open_history
from orchestrator.scheduler import RunDir

TRITON = "serve/cpu/tiny/moegate/triton/eager"
AUTO = "serve/cpu/tiny/moegate/auto/eager"


def launches(path):
    return Counter(entry.data["cell"] for entry in journal.read(path / "journal") if entry.kind == "launch")


def test_a_whole_run_passes_and_leaves_every_file(run, states):
    session = run()
    assert session.interrupted is None
    assert set(states(run.path).values()) == {"PASSED"}
    verdict = conclude(run.path)
    assert verdict.exit == 0, verdict
    names = {path.name for path in run.path.iterdir()}
    assert names >= {"plan.json", "journal", "cells", "configs", "comparison.json", "gate.json", "report.html", "junit.xml",
                     "results.sarif", "summary.md"}  # fmt: skip
    for entry in journal.read(run.path / "journal"):
        if entry.kind == "done":
            assert file_digest(run.path / entry.data["result"]) == entry.data["sha256"]
            folder = (run.path / entry.data["result"]).parent
            assert {path.name for path in folder.iterdir()} <= {"result.json", "stdout.log", "stderr.log"}


def test_stages_are_attempts_of_their_own_and_pairs_alternate(run):
    run()
    facts = read_run(run.path)
    cell = next(cell for cell in facts.plan.cells if cell.label == TRITON)
    screen, confirm = facts.measurements[cell.id]
    assert [len(screen.launches), len(confirm.launches)] == [4, 6]
    assert {launch.stage for launch in screen.launches} == {"screen"}
    for measurement in (screen, confirm):
        orders = []
        for first, second in zip(measurement.launches[::2], measurement.launches[1::2], strict=True):
            assert first.pair == second.pair
            assert {first.arm, second.arm} == {"untuned", "tuned"}
            orders.append(first.arm)
        for first, second in zip(orders[::2], orders[1::2], strict=False):
            assert first != second, "an ABBA block turns the order round"
    assert len({launch.device.identity for m in (screen, confirm) for launch in m.launches}) == 1


def test_what_a_cell_asks_for_is_on_its_command_line(run):
    run()
    facts = read_run(run.path)
    both = next(typed for cell, typed in facts.commands.items() if cell.startswith("serve-"))
    assert [typed.arm for typed in both] == ["untuned", "tuned"]
    assert all("--configs=" in typed.line and "-- " in typed.line for typed in both)
    tune = next(cell for cell in facts.plan.cells if cell.kind == "tune")
    assert "--configs=none" in both[0].line
    assert f"configs/{tune.id}" in both[1].line
    assert any(name.startswith(f"{tune.id}/configs/triton_3_8_0/") for name in facts.config_files)


def test_a_command_of_the_report_can_be_pasted_and_writes_where_it_is_typed(run, tmp_path):
    run()
    before = sorted(str(path) for path in run.path.rglob("*"))
    facts = read_run(run.path)
    for kind in ("kernel-bench", "serve"):
        here = tmp_path / f"typed {kind}"
        here.mkdir()
        both = next(typed for cell, typed in facts.commands.items() if cell.startswith(f"{kind}-"))
        for arm, command in ((typed.arm, typed.line) for typed in both):
            assert " TRITON_INTERPRET=1 " in command.partition(" -I ")[0], "what the run set is part of it"
            assert "OMP_NUM_THREADS=" in command
            assert "MOEGATE_" not in command
            subprocess.run(["sh", "-c", command], cwd=here, check=True, capture_output=True, timeout=60)
            assert json.loads((here / arm / "measurement.json").read_text())["kind"] == kind
        assert sorted(path.name for path in here.iterdir()) == ["tuned", "untuned"]
    assert sorted(str(path) for path in run.path.rglob("*")) == before, "the run is as it was"


def test_the_lines_of_a_run_its_log_and_its_report_count_launches_and_pairs_alike(run):
    run()
    cell = next(cell for cell in run.plan().cells if cell.label == TRITON)
    confirm = RunDir(run.path).attempt(cell.id, 2)
    heads = [
        line.split(", 20")[0]
        for line in (confirm / "stderr.log").read_text().splitlines()
        if line.startswith("== launch")
    ]
    launches = read_run(run.path).measurements[cell.id][1].launches
    assert heads == [f"== launch {x.order + 1}: arm {x.arm}, pair {x.pair + 1}" for x in launches]
    assert heads[0].startswith("== launch 1: ")
    said = [line.partition("]   ")[2] for line in run.log.getvalue().splitlines() if f"{TRITON} confirm pair" in line]
    assert [text.partition(": ")[0] for text in said] == [f"{TRITON} confirm pair {n} of 3" for n in (1, 2, 3)]
    assert all(
        re.search(r": output_throughput untuned (0\.99|1)\S* x, tuned 1\.[23]\S* x; gain \+[23]\d\.\d %$", text)
        for text in said
    )


def test_a_second_resume_executes_nothing(run):
    run()
    before, finished = (run.path / "journal").read_bytes(), read_run(run.path).finished
    session = run(resume=True)
    assert session.executed == 0
    assert read_run(run.path).finished == finished, "the report tells the time of the last work"
    assert finished == next(e.time for e in reversed(journal.read(run.path / "journal")) if e.kind == "final")
    assert (run.path / "journal").read_bytes().startswith(before)
    assert launches(run.path).total() == sum(line.count(b'"kind":"launch"') for line in before.splitlines())


def test_an_edited_matrix_runs_only_what_changed(run, states):
    run()
    before = launches(run.path)
    run.edit(("seed: 1}", "seed: 2}"))
    run(resume=True)
    after = launches(run.path)
    kept = {cell for cell in before if after[cell] == before[cell]}
    assert {cell.split("-")[0] for cell in set(after) - set(before)} == {"serve"}
    assert kept == set(before)
    assert set(states(run.path).values()) == {"PASSED"}


def test_a_report_of_a_run_still_going_leaves_the_history_alone_until_its_end(run, monkeypatch, tmp_path, capsys):
    db = tmp_path / "history.sqlite"
    monkeypatch.setenv("MOEGATE_HISTORY", str(db))

    def known():
        with open_history(db) as history:
            return [row.exit for row in history.runs()]

    run()
    with RunDir(run.path).hold():
        conclude(run.path)
        import_command([run.path], db=db, as_json=False)
        said = capsys.readouterr()
        assert known() == []
        assert said.out == f"still going    {run.path}\n"
        assert "note: the run is still going" in said.err
        assert "the run is still going" in (run.path / "report.html").read_text()
    conclude(run.path)
    assert "still going" not in capsys.readouterr().err + (run.path / "report.html").read_text()
    assert known() == [0]
    cell = next(cell for cell in run.plan().cells if cell.kind == "kernel-test")
    (RunDir(run.path).attempt(cell.id, 1) / "result.json").unlink()
    with RunDir(run.path).hold():
        assert conclude(run.path).exit == 3
    assert known() == [0], "what an earlier session came to stays until this one ends"
    conclude(run.path)
    assert known() == [3], "to be cut short is an end"


def test_a_resume_says_in_a_line_what_changed_and_how_many_cells_run_again(run, monkeypatch):
    def said():
        text = run.log.getvalue()
        run.log.seek(0), run.log.truncate()
        return [line.partition("]   ")[2] for line in text.splitlines() if "run again" in line]

    run()
    run(resume=True)
    assert said() == [], "a first run and one that keeps everything say nothing"
    monkeypatch.setattr("orchestrator.scheduler.keys.source_revision", lambda packages=(): "edited")
    assert run(resume=True).executed == 8  # six cells, of which two confirm
    assert said() == [
        "6 cells that were done are run again; changed since: sources (moegate, tuner, serving, xkernels)"
    ]
    cells = {cell.kind: cell.id for cell in run.plan().cells}
    next(RunDir(run.path).configs(cells["tune"]).rglob("E=*.json")).write_text('{"2": {"BLOCK_SIZE_M": 32}}')
    (RunDir(run.path).attempt(cells["kernel-test"], 2) / "result.json").unlink()
    run(resume=True)
    assert said() == ["4 cells that were done are run again; changed since: arms (variables, commit or config content); "
                      "results (missing or altered)"]  # fmt: skip


def test_a_tuned_tree_that_changed_makes_its_readers_run_again(run):
    run()
    before = launches(run.path)
    tune = next(cell for cell in run.plan().cells if cell.kind == "tune")
    file = next(RunDir(run.path).configs(tune.id).rglob("E=*.json"))
    file.write_text('{"2": {"BLOCK_SIZE_M": 32}}')
    run(resume=True)
    after = launches(run.path)
    assert all(after[cell] > before[cell] for cell in before if cell.startswith(("serve", "kernel-bench")))
    assert after[tune.id] == before[tune.id]


def test_a_result_that_was_changed_is_measured_again(run):
    run()
    cell = next(cell for cell in run.plan().cells if cell.kind == "kernel-test")
    result = RunDir(run.path).attempt(cell.id, 1) / "result.json"
    result.write_text(result.read_text().replace('"fake": "1"', '"fake": "2"'))
    assert {o.cell: o.state for o in read_run(run.path).outcomes}[cell.id] == "INFRA_ERROR"
    assert run(resume=True).executed == 1
    assert RunDir(run.path).attempt(cell.id, 2).is_dir()


def test_only_runs_the_chosen_cells_and_their_needs(run, states):
    run("serve/*/triton/*")
    assert set(states(run.path)) == {TRITON, "tune/cpu/tiny/fused_experts/float32/moegate"}


def test_an_existing_directory_is_not_touched_without_resume(run):
    run("check/*")
    before = sorted(path.stat().st_mtime_ns for path in run.path.rglob("*"))
    with pytest.raises(UsageError, match="--resume"):
        run("check/*")
    assert sorted(path.stat().st_mtime_ns for path in run.path.rglob("*")) == before


def test_resume_of_nothing_and_of_another_matrix(run):
    with pytest.raises(UsageError, match="does not exist"):
        run(resume=True)
    run("check/*")
    run.edit(("name: small", "name: other"))
    with pytest.raises(UsageError, match="is a run of small"):
        run("check/*", resume=True)


def test_a_held_directory_is_refused_and_nothing_is_written(run):
    run("check/*")
    with RunDir(run.path).hold():
        before = sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*"))
        with pytest.raises(RunLocked, match="held by another"):
            run("check/*", resume=True)
        assert sorted((str(path), path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before


# How a cell can end: the mode of its children, the state, a word of the reason, how many attempts.
ENDINGS = [
    ("segfault", "CRASHED", "SIGSEGV", 1),
    ("oom", "OOM", "OutOfMemoryError", 1),
    ("lost", "BLOCKED", "no device", 1),
    ("infra", "INFRA_ERROR", "the device is busy", 2),
    ("fail", "FAILED", "it does not work", 1),
    ("usage", "FAILED", "--nothing is wrong", 1),
    ("silent", "FAILED", "without a valid result", 1),
    ("nan", "FAILED", "NaN", 1),
    ("idle", "FAILED", "nothing was done", 1),
    ("wrong-backend", "INFRA_ERROR", "got reference", 1),
    ("wrong-tree", "INFRA_ERROR", "another tree", 1),
    ("all-default", "INFRA_ERROR", "fell back to the default", 1),
    ("void", "INFRA_ERROR", "void pairs", 2),
]


@pytest.mark.parametrize(("mode", "state", "reason", "attempts"), ENDINGS, ids=[row[0] for row in ENDINGS])
def test_how_a_cell_ends(run, mode, state, reason, attempts):
    run.edit(("tuned: {configs: tuned}", f"tuned: {{configs: tuned, env: {{FAKE: {mode}}}}}"))
    run("serve/*/triton/*")
    outcome = read_run(run.path).outcomes[-1]
    assert outcome.state == state, outcome
    assert reason in outcome.reason
    assert len(outcome.attempts) == attempts
    assert conclude(run.path).exit == (3 if state in ("INFRA_ERROR", "BLOCKED") else 1)


def test_a_hanging_child_is_ended_at_its_deadline(run):
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: tuned, env: {FAKE: hang}}"),
             ("    batch_sizes: [2]", "    batch_sizes: [2]\n    timeout: 4s"))  # fmt: skip
    run("kernel-bench/*")
    outcome = read_run(run.path).outcomes[-1]
    assert (outcome.state, outcome.reason) == ("TIMEOUT", "did not end within 4 s")


def test_a_flood_of_output_is_cut_and_the_cell_still_counts(run):
    run.edit(
        ("untuned: {configs: none}", "untuned: {configs: none, env: {FAKE: flood}}"),
        ("screen: 2, confirm: 3", "screen: 1, confirm: 1"),
    )
    run("kernel-bench/*")
    assert read_run(run.path).outcomes[-1].state == "PASSED"
    logs = list(run.path.rglob("stdout.log"))
    assert max(log.stat().st_size for log in logs) < 9 << 20
    assert any(b"truncated" in log.read_bytes()[-200:] for log in logs)


def test_what_needs_a_failed_cell_is_blocked_and_the_rest_goes_on(run, states):
    run.edit(("  cpu: {device: cpu, ray: none, isolation: process}",
              "  cpu: {device: cpu, ray: none, isolation: process, image: i}"),
             ("pools:\n", f"images:\n  i: {{reference: 'x@sha256:{'0' * 64}', env: {{FAKE_ONLY: tune=link}}}}\npools:\n"))  # fmt: skip
    run()
    found = states(run.path)
    assert found["tune/cpu/tiny/fused_experts/float32/moegate"] == "FAILED"
    assert found[TRITON] == found[AUTO] == "BLOCKED"
    assert found["kernel-test/cpu/fused_experts/float32"] == found["check/tiny/moegate"] == "PASSED"
    verdict = conclude(run.path)
    assert verdict.exit == 1
    outcome = next(o for o in read_run(run.path).outcomes if o.state == "FAILED")
    assert "is a link" in outcome.reason


def test_a_pool_that_cannot_be_had_blocks_only_its_own_cells(run, states):
    run.edit(("pools:\n", "pools:\n  gpu: {device: cuda, ray: none, isolation: process}\n"),
             ("  - kind: check", "  - {kind: kernel-test, pools: [gpu], dtypes: [float16]}\n  - kind: check"))  # fmt: skip
    run()
    found = states(run.path)
    assert found.pop("kernel-test/gpu/fused_experts/float16") == "BLOCKED"
    assert set(found.values()) == {"PASSED"}
    assert conclude(run.path).exit == 3


def test_more_slots_than_the_host_has_is_exit_3(run, states):
    run.edit(("ray: none, isolation", "ray: none, slots: 1000, isolation"))
    run("kernel-test/*")
    assert set(states(run.path).values()) == {"BLOCKED"}
    assert conclude(run.path).exit == 3


def test_the_budget_ends_a_run_and_resume_goes_on(run, states):
    run.edit(("margin: 1%", "margin: 1%, budget: 1s"),
             ("untuned: {configs: none}", "untuned: {configs: none, env: {FAKE_SLEEP: '0.3'}}"))  # fmt: skip
    run()
    found = states(run.path)
    assert "CANCELLED" in found.values()
    assert conclude(run.path).exit == 3
    run.edit(("budget: 1s", "budget: 10m"))
    run(resume=True)
    assert set(states(run.path).values()) == {"PASSED"}


def test_a_child_that_flees_its_group_is_found(run):
    run.edit(
        ("untuned: {configs: none}", "untuned: {configs: none, env: {FAKE: orphan}}"),
        ("screen: 2, confirm: 3", "screen: 1, confirm: 1"),
    )
    run("kernel-bench/*")
    from orchestrator.pools.isolation.process import ProcessIsolation
    from orchestrator.scheduler.state import run_id

    name = run_id(journal.read(run.path / "journal"))
    assert ProcessIsolation().reap(name) == 0, "nothing is left for the reaper: each launch cleans up after itself"


def test_the_environment_of_the_orchestrator_never_reaches_a_child(run, monkeypatch):
    monkeypatch.setenv("FAKE", "findings")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    run("check/*")
    assert read_run(run.path).outcomes[0].state == "PASSED"
