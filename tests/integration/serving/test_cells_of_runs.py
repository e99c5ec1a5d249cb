"""Cells with the real server and load client, as a run starts them: two servers up at once, and answers compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MATRIX = f"""\
schema: 1
name: serving
pools: {{cpu: {{device: cpu, ray: none, isolation: process}}}}
models: {{tiny: {{config: {ROOT}/examples/models/tiny-moe, dtype: float32}}}}
arms: {{old: {{configs: none}}, new: {{configs: none, env: {{ARM: new}}}}}}
defaults: {{pools: [cpu], models: [tiny], timeout: 2m}}
cells:
  - kind: serve
    residency: both
    load: {{requests: 4, concurrency: 2, input: 4, output: 16, seed: 1}}
compare: {{baseline: old, candidate: new, expect: no_regression, screen: 1, confirm: 1, futility: none}}
gate: {{metric: {{serve: output_throughput}}, q: 0.5, tolerance: 50%}}
"""


def run(folder: Path, matrix: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    (folder / "matrix.yaml").write_text(matrix)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "run", "matrix.yaml", "--out", "run", "--json"],
        capture_output=True, text=True, cwd=folder, timeout=280,
        env={**os.environ, "MOEGATE_LOCK_DIR": str(folder / "locks")},
    )  # fmt: skip
    assert done.returncode != 2, done.stderr
    results = sorted((folder / "run" / "cells").glob("*/attempt-*/result.json"))
    return done, [json.loads(path.read_text()) for path in results]


@pytest.mark.slow
def test_both_servers_of_a_pair_are_up_while_their_loads_alternate(tmp_path: Path) -> None:
    done, (result, *_) = run(tmp_path, MATRIX)  # a busy machine voids pairs and moves verdicts; neither is asked here
    one, other = result["launches"][:2]
    assert {one["arm"], other["arm"]} == {"old", "new"}, done.stderr
    assert (one["pair"], one["order"], other["pair"], other["order"]) == (0, 0, 0, 1)
    spans = []
    for launch in (one, other):
        began = datetime.fromisoformat(launch["started"])
        spans.append((began, began + timedelta(seconds=launch["wall_s"])))
        throughput = next(s for s in launch["samples"] if s["metric"] == "output_throughput")
        assert len(throughput["values"]) == 2, "one value per round"
        assert len(launch["detail"]["rounds"]) == 2
    assert spans[1][0] < spans[0][1], "the second was up before the first was over"
    assert one["detail"]["requests_sha256"] == other["detail"]["requests_sha256"]
    assert result["work"]["requests"] % 16 == 0, "two arms, two rounds, four requests"
    (folder,) = (tmp_path / "run" / "cells").iterdir()
    headings = [line for line in (folder / "attempt-1" / "stderr.log").read_text().splitlines() if line[:2] == "=="]
    assert len(headings) == len(result["launches"])
    assert not list((folder / "attempt-1").glob("launch-*")), "working files are gone"


def test_a_server_that_has_no_room_beside_its_partner_ends_the_pair_with_the_numbers(tmp_path: Path) -> None:
    """The second arm's server cannot serve what it is asked for: nothing is measured, and both are gone."""
    big = tmp_path / "big"
    big.mkdir()
    config = json.loads((ROOT / "examples" / "models" / "tiny-moe" / "config.json").read_text())
    config |= {"max_position_embeddings": 1 << 30, "num_hidden_layers": 40, "hidden_size": 1 << 16}
    (big / "config.json").write_text(json.dumps(config))
    done, _ = run(tmp_path, MATRIX.replace(f"{ROOT}/examples/models/tiny-moe", str(big)))
    assert done.returncode == 1, done.stderr
    assert "do not fit the device's memory" in done.stderr
    assert "swap needs room for one" in done.stderr


@pytest.mark.slow
def test_answers_of_two_arms_are_compared_sample_by_sample(tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "prompt": [2, 17, 91 + i], "output": 4} for i in range(20)]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    start, end = MATRIX.index("  - kind: serve"), MATRIX.index("compare:")
    cells = "  - {kind: accuracy, samples: samples.jsonl}\n"
    done, (result, *_) = run(tmp_path, MATRIX[:start] + cells + MATRIX[end:])
    assert done.returncode in (0, 4), done.stderr
    assert [launch["arm"] for launch in result["launches"]] == ["old", "new"]
    assert result["work"] == {"samples": 40}
    answers = [launch["detail"]["answers"] for launch in result["launches"]]
    assert answers[0].keys() == answers[1].keys() == {row["id"] for row in rows}
    text = (tmp_path / "run" / "report.html").read_text()
    assert "all 20 answers are the same; log-probabilities differ by at most" in text
