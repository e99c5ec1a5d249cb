"""The kernels under Triton's interpreter, in a child: the interpreter is for a whole process or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("cases/case_*.py"))
LIMIT_S = 280.0  # of one file
START_S = 200.0  # until the first test runs
LINE = re.compile(r"(case_\w+)\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED)")


@dataclass
class Outcomes:
    """What the child said: results per case file, its output, and at which file it was given up or crashed."""

    results: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    output: str = ""
    stuck: str = ""


def run(cases: Sequence[Path], log: Path, limit_s: float) -> Outcomes:
    """Run case files in one child, since its imports take seconds. Each file has its own `limit_s`."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONUNBUFFERED": "1"}
    argv = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "-o",
            "python_files=case_*.py", *map(str, cases)]  # fmt: skip
    found, name, since = Outcomes(), "", time.monotonic()
    with log.open("wb") as stream:
        child = subprocess.Popen(argv, env=env, stdout=stream, stderr=stream, start_new_session=True)
    try:
        while child.poll() is None:
            names = re.findall(r"(case_\w+)\.py::", log.read_text(errors="replace"))
            now = names[-1] if names else ""
            if now != name:
                name, since = now, time.monotonic()
            limit = limit_s if name else START_S
            if time.monotonic() - since > limit:
                found.stuck = f"{name or 'the collection'} did not end within {limit:g} s"
                break
            time.sleep(0.1)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = log.read_text(errors="replace")
    for case, test, result in LINE.findall(text):
        found.results.setdefault(case, []).append((test, result))
    if not found.stuck and child.returncode not in (0, 1):  # what ran before a crash has its results all the same
        last = re.findall(r"(case_\w+)\.py::", text)[-1:] or ["the collection"]
        found.stuck = f"{last[0]} ended the run with {child.returncode}"
    found.output = text[-6000:]
    return found


def wrong(found: Outcomes, case: str) -> list[str]:
    """What is wrong with one case file; empty where it passed."""
    if found.stuck and (found.stuck.startswith(f"{case} ") or case not in found.results):
        return [found.stuck]
    allowed = {"PASSED", "SKIPPED"} - ({"SKIPPED"} if case == "case_transformers" else set())  # it comes with `dev`
    return [test for test, result in found.results.get(case, [("nothing ran", "")]) if result not in allowed]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(CASES, tmp_path_factory.mktemp("cases") / "log", LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(START_S + LIMIT_S * len(CASES) + 60)
@pytest.mark.parametrize("case", CASES, ids=lambda p: p.stem)
def test_case_file(case: Path, outcomes: Outcomes) -> None:
    assert wrong(outcomes, case.stem) == [], outcomes.output


def test_a_file_that_hangs_is_named_and_what_ran_before_it_counts(tmp_path: Path) -> None:
    bodies = {
        "a_quick": "def test_well(): pass\ndef test_ill(): assert 0",
        "b_slow": "import time\ndef test_long(): time.sleep(600)",
        "c_late": "def test_never(): pass",
    }
    cases = [tmp_path / f"case_{name}.py" for name in bodies]
    for case, body in zip(cases, bodies.values(), strict=True):
        case.write_text(body)
    found = run(cases, tmp_path / "log", 5.0)
    assert found.stuck == "case_b_slow did not end within 5 s"
    assert wrong(found, "case_a_quick") == ["test_ill"]
    assert wrong(found, "case_b_slow") == wrong(found, "case_c_late") == [found.stuck]


def test_a_file_that_crashes_is_named_though_its_first_tests_passed(tmp_path: Path) -> None:
    case = tmp_path / "case_last.py"
    case.write_text("import os\ndef test_well(): pass\ndef test_crash(): os.kill(os.getpid(), 9)")
    assert wrong(run([case], tmp_path / "log", 60.0), "case_last") == ["case_last ended the run with -9"]
