"""Odd places and poor hosts: the run works, or ends with a clear word and can be resumed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from moegate import journal
from orchestrator.bundle import read_run

DRIVER_ENV = {"PATH": os.environ["PATH"], "PYTHONWARNINGS": "error"}


def test_a_path_with_spaces_and_other_letters_under_lang_c(run, tmp_path, monkeypatch):
    odd = tmp_path / "ein Ort, größer = 'x' $HOME"
    shutil.move(run.repository, odd)
    argv = [sys.executable, "-P", str(run.start.__func__.__globals__["DRIVER"]), str(odd), str(odd / "out put")]
    env = {
        **DRIVER_ENV,
        "LANG": "C",
        "LC_ALL": "C",
        "MOEGATE_LOCK_DIR": os.environ["MOEGATE_LOCK_DIR"],
        "HOME": "/nowhere",
    }
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert {outcome.state for outcome in read_run(odd / "out put").outcomes} == {"PASSED"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
@pytest.mark.parametrize("kib", [16, 40, 90])
def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(run, kib):
    disk = run.repository / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("this host does not let a test mount a tmpfs")
    try:
        run.path = disk / "run"
        text, _ = (process := run.start()).communicate(timeout=120)
        assert process.returncode != 0
        assert "No space left" in text
        if (run.path / "journal").is_file():
            journal.read(run.path / "journal")  # torn at most, never damaged
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        text, _ = (process := run.start(resume=run.path.is_dir())).communicate(timeout=120)
        assert process.returncode == 0, text
        assert {outcome.state for outcome in read_run(run.path).outcomes} == {"PASSED"}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_read_only_place_is_said_before_anything_runs(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    run.path = blocked / "run"
    from moegate.errors import InfraError

    with pytest.raises(InfraError, match="cannot be made"):
        run("check/*")


def test_standard_error_that_goes_away_does_not_end_a_run(run):
    process = run.start()
    assert process.stdout
    process.stdout.close()
    process.wait(timeout=120)
    assert {outcome.state for outcome in read_run(run.path).outcomes} == {"PASSED"}


def test_a_module_in_the_working_directory_is_never_imported(run, tmp_path, monkeypatch):
    for name in ("moegate", "json", "tuner", "torch", "kernels"):
        (run.repository / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "plan", str(run.repository / "matrix.yaml"), "--json"],
        capture_output=True, text=True, cwd=run.repository, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 6
