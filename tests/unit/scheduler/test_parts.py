"""The parts of the scheduler that need no run: endings, journal, run directory, keys, progress."""

import os
import time
from dataclasses import replace

import pytest

from moegate.errors import RecordError, UsageError
from moegate.journal import Entry, Journal, read
from moegate.records import ArmSpec, DeviceIdentity, GatePolicy, Plan, PlannedCell, write
from orchestrator.bundle import read_run
from orchestrator.plan import read_history
from orchestrator.pools.isolation import LaunchResult
from orchestrator.scheduler import RunDir, execute, keys, recover, rundir
from orchestrator.scheduler.classify import ending, last_line, tail
from orchestrator.scheduler.state import outcomes, read_cells

CPU = DeviceIdentity("cpu", "c", "cpu:host")


ENDINGS = [
    (LaunchResult(0), "", None, False),
    (LaunchResult(0, infra="the daemon went away"), "", "INFRA_ERROR", True),
    (LaunchResult(None, signal=9, timed_out=True), "", "TIMEOUT", False),
    (LaunchResult(None, signal=9, oom=True), "", "OOM", False),
    (LaunchResult(None, signal=11), "", "CRASHED", False),
    (LaunchResult(None, signal=9, cancelled=True), "", "CANCELLED", False),
    (LaunchResult(1), "hipErrorNoDevice", "DEVICE_LOST", True),
    (LaunchResult(1), "MemoryError", "OOM", False),
    (LaunchResult(3), "busy", "INFRA_ERROR", True),
    (LaunchResult(1), "no", "FAILED", False),
    (LaunchResult(2), "no", "FAILED", False),
]


@pytest.mark.parametrize(("result", "stderr", "state", "retry"), ENDINGS)
def test_how_a_launch_ended(result, stderr, state, retry):
    found = ending(result, stderr, 3.0)
    assert (found.state if found else None) == state
    assert (found.retry if found else False) == retry


def test_a_reason_from_a_log_is_short_and_harmless(tmp_path):
    assert last_line("first\n\x1b[31mred\x07 " + "x" * 1000 + "\n\n") == ("[31mred  " + "x" * 1000)[:300]
    file = tmp_path / "log"
    file.write_bytes(b"a" * 100_000 + b"\xff\xfeend")
    assert tail(file, 8).endswith("end")
    assert tail(tmp_path / "none") == ""


PLAN = Plan(
    "p", "m", "0", "t", "0",
    (PlannedCell("c1", "tune", "c1", {}, "", 1.0), PlannedCell("c2", "serve", "c2", {}, "", 1.0)),
    (), (), (), (), None, GatePolicy(),
)  # fmt: skip


def test_the_journal_says_where_each_cell_stands(tmp_path):
    with Journal.open(tmp_path / "journal") as journal:
        journal.append("run", run="r")
        journal.append(
            "lease", cell="c1", stage="only", attempt=1, slot="p/0", device="d", key="k", isolation="process"
        )
        assert outcomes(PLAN, read_cells(journal.entries))[0].state == "LEASED"
        journal.append("launch", cell="c1", attempt=1, number=0)
        assert outcomes(PLAN, read_cells(journal.entries))[0].state == "RUNNING"
        journal.append("done", cell="c1", stage="only", attempt=1, state="INFRA_ERROR", reason="r")
        assert outcomes(PLAN, read_cells(journal.entries))[0].state == "PLANNED"
        journal.append(
            "lease", cell="c1", stage="only", attempt=2, slot="p/0", device="d", key="k", isolation="process"
        )
        journal.append("done", cell="c1", stage="only", attempt=2, state="PASSED", result="x", sha256="s", ratios=[0.5])
        journal.append("final", cell="c1", state="PASSED", reason="")
    cells = read_cells(read(tmp_path / "journal"))
    first, second = outcomes(PLAN, cells)
    assert (first.state, [attempt.state for attempt in first.attempts]) == ("PASSED", ["INFRA_ERROR", "PASSED"])
    assert second.state == "PLANNED"
    assert cells["c1"].finished("only").number == 2
    assert cells["c1"].ratios[2] == (0.5,)


LEASE = {"cell": "c1", "stage": "only", "attempt": 1, "slot": "p/0", "device": "d", "key": "k", "isolation": "process"}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("lease", {"cell": "c1"}),
        ("lease", LEASE | {"cell": ["c1"]}),
        ("lease", LEASE | {"attempt": "1"}),
        ("lease", LEASE | {"stage": "first"}),
        ("launch", {"cell": "never leased", "attempt": 1}),
        ("done", {"cell": "never leased", "attempt": 1, "state": "PASSED"}),
        ("done", {"cell": "c1", "attempt": 1}),
        ("done", {"cell": "c1", "attempt": 1, "state": "FINE"}),
        ("done", {"cell": "c1", "attempt": 1, "state": "FAILED", "reason": 7}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "wall_s": 10**400}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "wall_s": 1e300}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "wall_s": -1.0}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "ratios": [0.1] * 501}),
        ("done", {"cell": "c1", "attempt": [1], "state": "PASSED"}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "ratios": ["x"]}),
        ("done", {"cell": "c1", "attempt": 1, "state": "PASSED", "commands": 1}),
        ("final", {"cell": "c1", "state": 1.5}),
        ("final", {"state": "PASSED"}),
    ],
)
def test_an_entry_that_no_orchestrator_writes_is_refused_by_its_number(tmp_path, kind, data):
    with Journal.open(tmp_path / "journal") as journal:
        journal.append("lease", **LEASE)
        journal.append(kind, **data)
    with pytest.raises(RecordError, match=rf"journal entry 2 \({kind}\)"):
        read_cells(read(tmp_path / "journal"))


def test_an_earlier_run_that_cannot_be_read_costs_no_plan(tmp_path):
    for name, wall in (("a", "long"), ("b", 10**400), ("c", [1]), ("d", 1e300), ("e", -5.0)):
        with Journal.open(tmp_path / name / "journal") as journal:
            journal.append("done", cell="c1", attempt=1, state="PASSED", wall_s=wall)
    with Journal.open(tmp_path / "good" / "journal") as journal:
        journal.append("done", cell="c1", attempt=1, state="PASSED", wall_s=7.0)
        journal.append("final", cell="c1", state="PASSED")
        journal.append("done", cell="c2", attempt=1, state="PASSED", wall_s=3.0)  # screened, then interrupted
        journal.append("final", cell="c2", state="CANCELLED")
    known = read_history(tmp_path.iterdir())
    assert (known.seconds, known.screens) == ({"c1": 7.0}, {})


def test_what_screening_took_before_is_remembered_apart(tmp_path):
    with Journal.open(tmp_path / "a" / "journal") as journal:
        for stage, wall in (("screen", 2.0), ("confirm", 9.0)):
            journal.append("done", cell="c1", attempt=1, state="PASSED", wall_s=wall, stage=stage)
        journal.append("final", cell="c1", state="PASSED")
    known = read_history(tmp_path.iterdir())
    assert (known.seconds, known.screens) == ({"c1": 11.0}, {"c1": 2.0})


def test_a_folder_of_something_else_is_not_resumed(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        execute(PLAN, tmp_path, resume=True, root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", ".plan.json.77.tmp"), ("plan.json", "anything")])
def test_what_died_early_can_be_resumed(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("")
    assert RunDir(tmp_path).resumable()


def test_a_pipe_in_place_of_the_lock_does_not_stop_who_looks(tmp_path):
    os.mkfifo(tmp_path / "lock")
    assert RunDir(tmp_path).holder() is None


def test_a_key_changes_with_everything_that_counts_and_with_nothing_else():
    cell = PLAN.cells[1]
    base = keys.key(PLAN, cell, env={}, image={}, trees={})
    assert keys.key(PLAN, cell, env={"HOME": "/x"}, image={}, trees={}) == base
    assert keys.key(replace(PLAN, created="later", name="q"), cell, env={}, image={}, trees={}) == base
    changed = [
        keys.key(PLAN, cell, env={"TRITON_X": "1"}, image={}, trees={}),
        keys.key(PLAN, cell, env={"IGC_X": "1"}, image={}, trees={}),
        keys.key(PLAN, cell, env={}, image={"image.a.id": "sha"}, trees={}),
        keys.key(PLAN, replace(cell, axes={"a": 1}), env={}, image={}, trees={}),
        keys.key(replace(PLAN, seed=1), cell, env={}, image={}, trees={}),
    ]
    assert len({base, *changed}) == len(changed) + 1
    differ = [{n for n in base.parts if base.parts[n] != other.parts[n]} for other in changed]
    assert differ == [{"codegen"}, {"codegen"}, {"image"}, {"axes"}, {"seed"}]
    assert keys.words(base.parts) == keys.words({*base.parts, "of a later version"})
    assert len(keys.words(base.parts)) == len(base.parts), "each part has a word"


def test_what_a_journal_without_the_parts_of_keys_cannot_say_is_said():
    cells = read_cells(
        [Entry(1, "lease", "", LEASE), Entry(2, "done", "", {"cell": "c1", "attempt": 1, "state": "PASSED"})]
    )
    again = recover.RunAgain()
    assert again.line() == ""
    again.add(cells["c1"], recover.Owed("only"), lambda: keys.Key("another", {"source": "s"}))
    assert again.line() == (
        "1 cell that was done is run again; changed since: something that the journal of an older version does not name"
    )
    read_again = Entry(1, "lease", "", {**LEASE, "parts": ["source"]})
    with pytest.raises(RecordError, match=r"journal entry 1 \(lease\)"):
        read_cells([read_again])


def test_a_source_revision_is_found_without_importing(tmp_path):
    import subprocess
    import sys

    program = (
        "import sys; from orchestrator.scheduler.keys import source_revision; r = source_revision();"
        "print(len(r), [n for n in ('torch', 'tuner', 'serving', 'xkernels') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "64 []"


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("a", "/etc/passwd"),
        ("a", "cells/a/attempt-1/../../../x/result.json"),
        ("a", "cells/b/attempt-1/result.json"),
        ("../x", "cells/../x/attempt-1/result.json"),
    ],
)
def test_a_result_lies_in_its_attempt_and_nowhere_else(tmp_path, cell, said):
    with pytest.raises(UsageError, match="cannot have its result"):
        RunDir(tmp_path).result_file(cell, 1, said, None)


def test_a_result_that_is_a_link_or_too_large_is_not_read(tmp_path):
    file = RunDir(tmp_path).attempt("a", 1) / "result.json"
    file.parent.mkdir(parents=True)
    file.symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="is missing"):
        RunDir(tmp_path).result_file("a", 1, "cells/a/attempt-1/result.json", None)
    file.unlink()
    file.touch()
    os.truncate(file, 300 << 30)
    with pytest.raises(UsageError, match="at most"):
        RunDir(tmp_path).result_file("a", 1, "cells/a/attempt-1/result.json", "0" * 64)


def test_a_run_directory_with_too_long_a_name_is_the_persons_fault(tmp_path):
    with pytest.raises(UsageError, match="File name too long"):
        RunDir(tmp_path / ("x" * 300)).create()


@pytest.mark.parametrize("configs", ["/" + "x" * 300, "/" + "x/" * 3000, "/dev/null", "/"])
def test_an_arm_that_leads_nowhere_costs_a_report_only_its_configs(tmp_path, configs):
    """A plan that somebody sent may name any place: it is not walked to its end."""
    began = time.monotonic()
    write(tmp_path / "plan.json", replace(PLAN, arms=(ArmSpec("a", configs=configs),)))
    facts = read_run(tmp_path)
    assert len(facts.config_files) <= 64
    assert [outcome.state for outcome in facts.outcomes] == ["PLANNED", "PLANNED"]
    assert time.monotonic() - began < 20.0


def test_config_files_of_an_arm_are_found_at_every_depth_that_a_tree_has(tmp_path):
    name = "E=8,N=128,device_name=cpu.json"
    for above in ("", "triton_3_8_0/", "configs/triton_3_8_0/"):
        (tmp_path / "tree" / above).mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / above / name).write_text("{}")
    (tmp_path / "tree" / "E=8,N=128,device_name=cpu.provenance.json").write_text("{}")
    write(tmp_path / "plan.json", replace(PLAN, arms=(ArmSpec("a", configs=str(tmp_path / "tree")),)))
    assert sorted(read_run(tmp_path).config_files) == sorted(
        f"a/{above}{name}" for above in ("", "triton_3_8_0/", "configs/triton_3_8_0/")
    )


def test_many_attempts_of_one_cell_are_read_in_one_pass():
    numbers = range(1, 20_001)
    leases = [Entry(n, "lease", "", {**LEASE, "attempt": n}) for n in numbers]
    ends = [Entry(n, "done", "", {"cell": "c1", "attempt": n, "state": "FAILED"}) for n in reversed(numbers)]
    began = time.process_time()
    history = read_cells([*leases, *ends])["c1"]
    assert {attempt.state for attempt in history.attempts} == {"FAILED"}
    assert time.process_time() - began < 20.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "has 2 cells; at most 1 are read"),
        (
            {"cells": PLAN.cells[:1], "gate": GatePolicy(required=("a",) * 1001)},
            "has 1,001 globs of the gate; at most 1,000",
        ),
    ],
)
def test_a_plan_larger_than_any_matrix_makes_is_refused(tmp_path, monkeypatch, changes, said):
    assert rundir.MOST_CELLS == 100_000
    monkeypatch.setattr(rundir, "MOST_CELLS", 1)
    write(tmp_path / "plan.json", replace(PLAN, **changes))
    with pytest.raises(RecordError, match=said):
        RunDir(tmp_path).read_plan()
