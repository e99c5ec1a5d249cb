"""The command itself with the real tuner, server and load client, as small as it goes: it must find the regression."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MATRIX = f"""\
schema: 1
name: real
pools: {{cpu: {{device: cpu, ray: none, isolation: process}}}}
models: {{tiny: {{config: {ROOT}/examples/models/tiny-moe, dtype: float32}}}}
arms: {{good: {{configs: {ROOT}/examples/configs/tuned}}, bad: {{configs: {ROOT}/examples/configs/regressed}}}}
defaults: {{pools: [cpu], models: [tiny], moe_runner_backend: triton, timeout: 2m}}
cells:
  - kind: check
  - kind: kernel-bench
    batch_sizes: [2]
  - kind: serve
    load: {{requests: 2, concurrency: 2, input: 2, output: 2, seed: 1}}
compare: {{baseline: good, candidate: bad, screen: 1, confirm: 1, futility: none}}
gate: {{metric: {{serve: output_throughput}}, q: 0.5}}
"""


@pytest.mark.slow
def test_real_cells_find_a_real_regression_and_every_report_names_them(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "run", "matrix.yaml", "--out", "run", "--json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    regressed = {reason["cell"].split("-")[0] for reason in verdict["reasons"] if reason["exit"] == 1}
    assert regressed == {"kernel", "serve"}, done.stderr
    for name in ("report.html", "summary.md", "junit.xml"):
        text = (tmp_path / "run" / name).read_text()
        for cell in ("kernel-bench", "serve"):
            assert f"{cell}/cpu/tiny" in text or cell in text, (name, cell)
        assert "regress" in text.lower()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    for cell in plan["cells"]:
        if cell["arms"]:
            result = json.loads((tmp_path / "run" / "cells" / cell["id"] / "attempt-1" / "result.json").read_text())
            assert result["interpreter"] is True
            assert {use["reason"] for launch in result["launches"] for use in launch["proof"]["configs"]} == {"exact"}
