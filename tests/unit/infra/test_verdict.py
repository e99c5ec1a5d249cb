"""The last job of a gated workflow fails closed: every gap between the plan and what came back is exit 3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MATRIX = """\
schema: 1
name: verdict
models: {tiny: {config: examples/models/tiny-moe, dtype: float32}}
cells:
  - {kind: check, models: [tiny]}
"""


def python(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *(str(item) for item in argv)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with matrix, trusted plan and a finished run of one real check cell."""
    folder = tmp_path_factory.mktemp("verdict")
    shutil.copytree(ROOT / "examples" / "models" / "tiny-moe", folder / "examples" / "models" / "tiny-moe")
    (folder / "matrix.yaml").write_text(MATRIX)
    planned = python("-m", "orchestrator", "plan", "matrix.yaml", "--json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    (folder / "plan.json").write_text(planned.stdout)
    done = python("-m", "orchestrator", "run", "matrix.yaml", "--out", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def received(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "received")
    return tmp_path / "received"


def judge(folder: Path) -> tuple[int, str]:
    argv = ("--plan", folder / "plan.json", "--run", folder / "run")
    done = python(
        ROOT / "infra/ci/verdict.py", *argv, "--summary", folder / "summary", "--status", folder / "status", cwd=folder
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_a_whole_run_is_judged_by_its_own_policy(received: Path) -> None:
    code, text = judge(received)
    assert code == 0, text
    assert (received / "status").read_text().startswith("state=success\ntext=")
    assert (received / "summary").stat().st_size > 50


def test_no_results_is_no_verdict(received: Path) -> None:
    shutil.rmtree(received / "run")
    code, text = judge(received)
    assert (code, "no results were received" in text) == (3, True)
    assert (received / "status").read_text().startswith("state=error\n")


def edit(path: Path, change: str) -> None:
    document = json.loads(path.read_text())
    if change == "drop":
        document["cells"] = []
    elif change == "rename":
        document["cells"][0]["id"] = "check-000000000000"
    elif change == "matrix":
        document["matrix_digest"] = "0" * 64
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("change", ["drop", "rename", "matrix"])
def test_another_plan_is_no_verdict(received: Path, change: str) -> None:
    edit(received / "run" / "plan.json", change)
    assert judge(received)[0] == 3


def test_a_softened_policy_is_put_aside(received: Path) -> None:
    path = received / "run" / "plan.json"
    document = json.loads(path.read_text())
    document["gate"]["margin"] = 0.9
    path.write_text(json.dumps(document))
    assert judge(received)[0] == 0
    assert json.loads(path.read_text())["gate"]["margin"] == 0.01


def test_a_cell_without_an_end_is_no_verdict(received: Path) -> None:
    journal = received / "run" / "journal"
    kept = [line for line in journal.read_text().splitlines(keepends=True) if '"kind":"final"' not in line]
    journal.write_text("".join(kept))
    code, text = judge(received)
    assert (code, "have no result" in text or "cannot be believed" in text) == (3, True)


def test_a_damaged_journal_is_no_verdict(received: Path) -> None:
    journal = received / "run" / "journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 3] ^= 1
    journal.write_bytes(data)
    assert judge(received)[0] == 3


# The history of nights


def remember(folder: Path, revision: str = "a" * 40) -> subprocess.CompletedProcess[str]:
    """Two runs of a night, of which only one was received."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    argv = [str(ROOT / "infra/ci/history.sh"), "history.sqlite", revision, "run", "nothing"]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_night_is_remembered_once(received: Path) -> None:
    for word in ("imported", "already there"):
        done = remember(received)
        assert done.returncode == 0, done.stderr
        assert word in done.stdout
        assert "nothing: nothing was received" in done.stdout
    assert done.stdout.count("exit 0") == 1
    assert "verdict:" in (received / "summary").read_text()


def test_a_night_that_cannot_be_believed_is_left_out_and_said(received: Path) -> None:
    (received / "run" / "plan.json").write_text("{}")
    done = remember(received)
    assert done.returncode == 1
    assert "left out" in done.stderr
    assert remember(received, "main").returncode == 2


@pytest.mark.parametrize("name", ["plan.json", "journal", "cells/link", "report.html"])
def test_a_link_is_no_verdict_and_nothing_is_written_through_it(received: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    path = received / "run" / name
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    code, text = judge(received)
    assert (code, "no plain file" in text) == (3, True)
    assert outside.read_text() == "precious"
