"""matrices/b60.yaml from end to end on four simulated cards: every part real but the cards, SGLang and the tuner."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
B60 = "Intel(R) Arc(TM) Pro B60 Graphics"
CARDS = {"0000:17:00.0": 2, "0000:1b:00.0": 0, "0000:97:00.0": 3, "0000:9b:00.0": 1}
# The same cells with a load of seconds, and a policy that fewer pairs can satisfy.
SMALL = {
    "cells[2].load": "{requests: 4, concurrency: 4, input: 8, output: 8, seed: 42}",
    "compare.screen": "1",
    "compare.confirm": "5",
    "compare.futility": "none",
    "gate.q": "0.1",
    "gate.margin": "5%",
}
LABELS = {
    "check/ocr2/sglang",
    "tune/b60/ocr2/fused_experts/bfloat16/sglang",
    *(f"serve/b60/ocr2/sglang/{backend}/{graph}" for backend in ("auto", "triton") for graph in ("eager", "full")),
    "accuracy/b60/ocr2/sglang/triton/eager",
}


def orchestrator(python: Path, *argv: str, locks: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MOEGATE_LOCK_DIR": str(locks)}
    command = [str(python), "-P", "-m", "orchestrator", *argv]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)


def test_every_cell_is_planned_with_its_reason(simulated_host: Any, tmp_path: Path) -> None:
    python = simulated_host.standin(CARDS)
    done = orchestrator(python, "plan", "matrices/b60.yaml", "--json", locks=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {cell["label"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert set(cells) == LABELS
    for label, cell in cells.items():
        assert cell["why"], label
        assert cell["estimate_s"] > 0, label
        control = "/auto/" in label
        assert cell["control"] is control, label
        assert ("negative control: auto resolves to intel_xpu on xpu-bmg" in cell["why"]) is control, label
    shipped = (
        "--model=examples/models/deepseek-ocr-2",
        f"--device={B60}",
        "--triton=3.8.0",
        "--engine=sglang",
        "--json",
    )
    for backend in ("auto", "triton"):
        told = json.loads(orchestrator(python, "explain", *shipped, f"--backend={backend}", locks=tmp_path).stdout)
        assert told["reachable"] is (backend == "triton"), told["why"]
        assert {found["reason"] for found in told["projections"].values()} == {"exact"}


@pytest.mark.slow
@pytest.mark.ray
def test_the_b60_matrix_runs_on_four_cards(simulated_host: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -e '.[ray]'")
    python = simulated_host.standin(CARDS)
    (tmp_path / "weights").mkdir()
    settings = {**SMALL, "models.ocr2.weights": str(tmp_path / "weights")}
    run = tmp_path / "run"
    done = orchestrator(
        python, "run", "matrices/b60.yaml", f"--out={run}", "--isolation=process", "--json",
        *(f"--set={name}={value}" for name, value in settings.items()), locks=tmp_path / "locks",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["exit"] == 0, verdict
    said = json.loads((run / "comparison.json").read_text())
    labels = {cell["id"]: cell["label"] for cell in json.loads((run / "plan.json").read_text())["cells"]}
    found = {labels[cell["cell"]]: cell["verdict"] for cell in said["cells"]}
    assert found == {
        **found,
        **dict.fromkeys((name for name in LABELS if "serve" in name and "triton" in name), "improved"),
    }
    assert set(found) == {name for name in LABELS if name.startswith(("serve", "accuracy"))}
    used: dict[str, set[str]] = {}
    for path in run.glob("cells/*/attempt-*/result.json"):
        for launch in json.loads(path.read_text())["launches"]:
            used.setdefault(path.parts[-3], set()).add(launch["device"]["identity"])
            arm, uses = launch["arm"], launch["proof"]["configs"]
            if launch["proof"]["requested_backend"] == "triton":
                assert {use["reason"] for use in uses} == {"exact" if arm == "tuned" else "default"}
                assert {use["projection"] for use in uses} == {"up", "down"}
    assert all(len(cards) == 1 for cards in used.values()), "a cell's launches stay on one card"
    assert set().union(*used.values()) == set(CARDS)
    report = (run / "report.html").read_text()
    assert all(address in report for address in CARDS)
