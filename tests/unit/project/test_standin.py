"""What tests themselves stand on: stand-in programs, and numbers from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin import programs
from tests.standin.environment import number

SOURCE = """
    import json, sys
    print(json.dumps([sys.executable, *sys.argv]))
    sys.exit(3)
"""


@pytest.mark.parametrize("folder", ["plain", "it's a folder", 'quote"d $(exit 9) `exit 9` \\n #', "long" * 60])
def test_a_stand_in_runs_wherever_its_python_lies(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / folder).mkdir()
    python = tmp_path / folder / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(programs.sys, "executable", str(python))
    program = programs.write_program(tmp_path / folder / "bin" / "tool", SOURCE)
    done = subprocess.run([program, "a b", ""], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
    assert json.loads(done.stdout) == [str(python), str(program), "a b", ""]


def test_a_stand_in_may_be_a_script(tmp_path: Path) -> None:
    program = programs.write_program(tmp_path / "tool", "echo $#\n", shell="/bin/sh")
    assert subprocess.run([program, "a b"], capture_output=True, text=True, timeout=60).stdout == "1\n"


@pytest.mark.parametrize(("text", "value"), [("", 20), ("7", 7), (" 1 ", 1)])
def test_a_number_of_the_environment(text: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGATE_X", text)
    assert number("MOEGATE_X", 20, least=1) == value


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5", "1e3"])
def test_what_is_no_such_number_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGATE_X", text)
    with pytest.raises(
        pytest.Collector.CollectError, match=f"MOEGATE_X is '{text}'; must be a whole number, at least 1"
    ):
        number("MOEGATE_X", 20, least=1)


@pytest.mark.parametrize("text", ["nan", "inf", "-0.5", "x"])
def test_no_time_without_an_end(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGATE_X", text)
    with pytest.raises(pytest.Collector.CollectError, match=r"must be a number, at least 0\.0"):
        number("MOEGATE_X", 1.0, least=0.0)


def test_no_test_runs_and_the_reason_is_a_line() -> None:
    rounds = Path(__file__).parents[2] / "faults" / "test_rounds.py"
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(rounds)]
    env = {**os.environ, "MOEGATE_FAULT_ROUNDS": "abc"}
    done = subprocess.run(argv, cwd=rounds.parents[2], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "MOEGATE_FAULT_ROUNDS is 'abc'; must be a whole number" in done.stdout
    assert "environment.py" not in done.stdout + done.stderr
