"""Who runs the cases of `cases/`: nobody by accident, all of them on a GPU; and that each operator is in one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cases"
FILES = {path.name for path in FOLDER.glob("case_*.py")}
OPS = Path(__file__).parents[3] / "kernels/xkernels/ops"
COMMAND = "import sys, pytest; code = pytest.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"


def pytest_says(*args: str) -> tuple[int, list[str]]:
    """Exit code and lines of a run over the cases, on a host whose kernels run on the CPU."""
    argv = [sys.executable, "-c", COMMAND, "-q", "-p", "no:cacheprovider", str(FOLDER), *args]
    done = subprocess.run(argv, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("expression", ["not slow", "slow and not gpu"])
def test_other_runs_leave_the_cases_alone_and_import_no_torch(expression: str) -> None:
    code, said = pytest_says("-m", expression)
    assert (code, said[-1]) == (pytest.ExitCode.NO_TESTS_COLLECTED, "False")
    assert "skipped" not in "\n".join(said)


@pytest.mark.slow
def test_the_marker_finds_every_case_and_without_a_gpu_a_file_is_one_skip() -> None:
    code, said = pytest_says("-m", "gpu", "--collect-only")
    found = [line for line in said if "::" in line]
    assert code == 0
    assert {Path(line.split("::")[0]).name for line in found} == FILES
    assert any("case_experts.py::test_" in line and "[" in line for line in found)
    code, said = pytest_says("-m", "gpu or slow", "-rs")
    assert f"{len(FILES)} skipped" in said[-2]
    assert any("needs a GPU and its torch" in line for line in said)


def test_every_operator_is_held_to_its_twin_in_a_case() -> None:
    twins = {
        node.name for path in OPS.glob("*.py") for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_reference") and not node.name.startswith("_")
    }  # fmt: skip
    trees = [ast.parse((FOLDER / name).read_text(encoding="utf-8")) for name in FILES]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert len(twins) > 20
    assert {name for twin in twins for name in (twin, twin.removesuffix("_reference"))} <= used
