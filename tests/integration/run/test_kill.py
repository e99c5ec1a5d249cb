"""An orchestrator that is stopped, cancelled or met by a second one. For kills see tests/faults."""

import os
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.scheduler import RunDir
from tests.integration.run.history import check_history, wait_for_a_launch


@pytest.fixture
def held(run):
    """A run whose measuring launches stand still while the file that this returns is there: it cannot end too early."""
    hold = run.repository / "hold"
    hold.touch()
    run.edit(("untuned: {configs: none}", f"untuned: {{configs: none, env: {{FAKE_HOLD: '{hold}'}}}}"),
             ("timeout: 20s", "timeout: 300s"))  # fmt: skip
    return hold


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_resume_goes_on(run, held, number, code):
    process = run.start()
    wait_for_a_launch(process, run.path)
    process.send_signal(number)
    returned, text = finish(process)  # its launch would stand still for ever
    assert returned == code, text
    assert {"PASSED", "CANCELLED"} == set(check_history(run.path).values())
    held.unlink()
    returned, text = finish(run.start(resume=True))
    assert returned == 0, text
    assert set(check_history(run.path).values()) == {"PASSED"}


def test_a_second_signal_changes_nothing_of_that(run, held):
    process = run.start()
    wait_for_a_launch(process, run.path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    check_history(run.path)
    held.unlink()
    assert finish(run.start(resume=True))[0] == 0
    assert set(check_history(run.path).values()) == {"PASSED"}


def test_cancel_stops_the_holder_and_keeps_what_was_finished(run, held):
    process = run.start()
    wait_for_a_launch(process, run.path)
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "cancel", str(run.path)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (asked.returncode, asked.stdout.strip()) == (0, "stopped"), asked.stderr
    finish(process)
    assert {"PASSED", "CANCELLED"} == set(check_history(run.path).values())
    held.unlink()
    assert finish(run.start(resume=True))[0] == 0
    assert set(check_history(run.path).values()) == {"PASSED"}


def test_the_second_orchestrator_of_a_directory_ends_at_once(run, held):
    first = run.start()
    wait_for_a_launch(first, run.path)
    second = run.start(resume=True)
    _, text = finish(second)
    assert "RunLocked" in text
    assert first.poll() is None
    first.kill()
    finish(first)


def test_the_second_command_is_exit_3_names_the_holder_and_writes_nothing(run):
    run("check/*")
    with RunDir(run.path).hold():
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        argv = [sys.executable, "-P", "-m", "orchestrator", "run", str(run.repository / "matrix.yaml"), "--resume"]
        # It waits for nobody: the directory is held until this has ended.
        done = subprocess.run([*argv, "--out", str(run.path)], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (3, "")
        assert f"process {os.getpid()}, running since 20" in done.stderr
        assert f", for the run {run.path} (fix: wait for its end, or end it with `orchestrator cancel" in done.stderr
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_journal_that_was_torn_is_gone_on_with_and_a_damaged_one_is_refused(run):
    run("check/*")
    file = run.path / "journal"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"seq": 99, "kind": "don')
    assert run("check/*", resume=True).executed == 0
    whole = file.read_bytes()
    middle = whole.index(b"lease")
    file.write_bytes(whole[:middle] + b"x" + whole[middle + 1 :])
    from moegate.errors import RecordError

    with pytest.raises(RecordError, match="entry 2 is damaged"):
        run("check/*", resume=True)
