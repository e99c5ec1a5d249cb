"""docs/kernels.md: its example runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_example_of_fused_experts_runs_and_agrees_with_its_twin() -> None:
    [example] = BLOCK.findall((PROJECT / "docs/kernels.md").read_text())
    assert "assert_close(out, fused_experts_reference(" in example
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", example], env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
