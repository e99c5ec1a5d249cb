"""The kernels under Triton's interpreter, in a child: the interpreter is for a whole process or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("cases/case_*.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, int], str]:
    """Failures and number of tests per case file, and the child's output."""
    out = tmp_path_factory.mktemp("cases") / "junit.xml"
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=case_*.py",
            f"--junitxml={out}", *map(str, CASES)]  # fmt: skip
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=280, check=False)
    failures: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for case in ET.parse(out).iter("testcase"):
        name = str(case.get("classname")).rsplit(".", 1)[-1]
        counts[name] = counts.get(name, 0) + 1
        skipped = case.find("skipped") is not None and name == "case_transformers"  # it comes with the dev extra
        if skipped or case.find("failure") is not None or case.find("error") is not None:
            failures.setdefault(name, []).append(str(case.get("name")))
    return failures, counts, done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda p: p.stem)
def test_case_file(case: Path, outcomes: tuple[dict[str, list[str]], dict[str, int], str]) -> None:
    failures, counts, output = outcomes
    assert counts.get(case.stem, 0) > 0, output
    assert not failures.get(case.stem), output
