"""`orchestrator run` under real signals, whenever they come and whomever they reach, with a real Ray and without."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moegate.locks import holder_of, lock_directory
from orchestrator.scheduler import RunDir
from tests.integration.run.history import check_history, wait_for_a_launch

COMMAND = Path(__file__).with_name("command.py")
MODEL = Path(__file__).parents[2] / "standin" / "model"
MATRIX = """\
schema: 1
name: small
pools: {{cpu: {{device: cpu, ray: {ray}, isolation: process}}}}
models: {{tiny: {{config: model, dtype: float32}}}}
arms: {{one: {{configs: none, env: {{FAKE_HOLD: '{hold}'}}}}, two: {{configs: none, env: {{A: b}}}}}}
defaults: {{pools: [cpu], models: [tiny], timeout: 300s}}
cells:
  - {{kind: kernel-test, dtypes: [float32]}}
  - {{kind: kernel-bench, batch_sizes: [2]}}
compare: {{baseline: one, candidate: two, screen: 2, confirm: 2, futility: none}}
"""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
SOON_S = 30.0  # it takes two; on a busy host more. What it must not do is wait for a Ray that is gone, which takes 60.
needs_ray = [pytest.mark.ray, pytest.mark.slow]


class Command:
    """One `orchestrator run` in a session of its own, as a terminal or a CI runner starts it."""

    def __init__(self, folder: Path, ray: str) -> None:
        # Ray's folders lie here, and so tell what is ours. The path of a socket is short.
        self.temp = Path(tempfile.mkdtemp(prefix="sig-", dir="/tmp"))
        self.path, self.hold, self.folder, self.ray = folder / "out", folder / "hold", folder, ray
        self.hold.touch()
        (folder / "pyproject.toml").touch()
        shutil.copytree(MODEL, folder / "model")
        (folder / "matrix.yaml").write_text(MATRIX.format(ray=ray, hold=self.hold))

    def start(self, *options: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-P", str(COMMAND), "run", str(self.folder / "matrix.yaml"), f"--out={self.path}"]
        return subprocess.Popen(
            [*argv, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.temp)}, cwd=self.folder,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Command lines of living processes that belong to this run or its Ray."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                line = (path / "cmdline").read_bytes().decode(errors="replace") if path.name.isdigit() else ""
                environment = (path / "environ").read_bytes() if line else b""
            except OSError:
                continue
            if (str(self.temp) in line or str(self.temp).encode() in environment) and int(path.name) != os.getpid():
                found.append(line.replace("\0", " ")[:200])
        return found

    def ended(self, within_s: float) -> list[str]:
        """Wait until nothing of it is left; what is left after that."""
        end = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.1)
        return left


@pytest.fixture(params=["none", pytest.param("local", marks=needs_ray)])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Command]:
    if request.param == "local" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    made = Command(tmp_path, request.param)
    yield made
    shutil.rmtree(made.temp)


def wait_for_the_entry(process: subprocess.Popen[str]) -> None:
    """Wait until the program has its handlers: before, a signal ends an interpreter that has done nothing yet."""
    last = 1 << (signal.SIGHUP - 1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("SigCgt:")[1].split()[0], 16) & last:
            return
        time.sleep(0.005)
    raise AssertionError("it never began")


def send(process: subprocess.Popen[str], number: int, *, group: bool) -> tuple[int, str, float]:
    """Send a signal; the exit code, the output, and how long it took."""
    began = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, number)
    text, _ = process.communicate(timeout=120)
    return process.returncode, text, time.monotonic() - began


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("group", [True, False], ids=["group", "alone"])
def test_a_signal_during_a_launch_ends_the_run_and_resume_repeats_nothing(
    command: Command, number: signal.Signals, group: bool
) -> None:
    process = command.start()
    wait_for_a_launch(process, command.path)
    code, text, took = send(process, number, group=group)
    assert (code, "Traceback" in text) == (CODES[number], False), text
    assert f"stopped by {number.name}; what was finished is kept" in text
    assert took < SOON_S
    assert command.left() == []
    assert list(command.temp.glob("moegate-ray-*")) == []
    assert set(check_history(command.path).values()) == {"PASSED", "CANCELLED"}
    RunDir(command.path).hold().release()
    assert [path.name for path in lock_directory().iterdir() if holder_of(path)] == []
    command.hold.unlink()
    process = command.start("--resume")
    text, _ = process.communicate(timeout=240)
    assert set(check_history(command.path).values()) == {"PASSED"}, text
    assert command.left() == []


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_of_the_start(command: Command, number: signal.Signals) -> None:
    """Imports, plan, pools and Ray's start take up to four seconds, and each has its own way to lose a signal."""
    last = 3.5 if command.ray == "local" else 1.0
    for moment in (last * step / 7 for step in range(8)):
        process = command.start(*(["--resume"] if command.path.is_dir() else []))
        wait_for_the_entry(process)
        time.sleep(moment)
        assert process.poll() is None, process.communicate()[0]
        code, text, took = send(process, number, group=True)
        assert (code, "Traceback" in text) == (CODES[number], False), f"after {moment:.2f} s: {text}"
        assert took < SOON_S
        assert command.left() == []
        assert list(command.temp.glob("moegate-ray-*")) == []


def test_a_killed_orchestrator_takes_everything_with_it(command: Command) -> None:
    process = command.start()
    wait_for_a_launch(process, command.path)
    send(process, signal.SIGKILL, group=False)
    assert command.ended(SOON_S) == []
    assert list(command.temp.glob("moegate-ray-*")) == []
    command.hold.unlink()
    text, _ = command.start("--resume").communicate(timeout=240)
    assert set(check_history(command.path).values()) == {"PASSED"}, text


def test_who_comes_second_is_told_who_was_first_and_what_to_do(tmp_path: Path) -> None:
    first, second = Command(tmp_path, "none"), tmp_path / "second"
    process = first.start()
    try:
        wait_for_a_launch(process, first.path)
        who = f"process {process.pid}, running since "
        code, text = finished(first.start())
        assert code == 2
        assert f"another orchestrator runs there: {who}" in text
        assert "(fix: name another folder, or wait for its end and add --resume)" in text
        code, text = finished(first.start("--resume"))
        assert code == 3
        assert f"is held by another orchestrator: {who}" in text
        assert f"`orchestrator cancel {first.path}`" in text
        waiting = first.start(f"--out={second}")
        assert waiting.stdout is not None
        line = next(line for line in waiting.stdout if "waiting: " in line)
        assert f"is in use by another orchestrator: {who}" in line
        assert f", for the run {first.path} (the two take turns" in line
        code, text, took = send(waiting, signal.SIGTERM, group=True)
        assert (code, took < SOON_S) == (143, True), text
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(first.temp)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=60)
    return process.returncode, text
