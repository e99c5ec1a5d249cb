"""One cell of every kind in a container of the CPU image, through the whole control plane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from orchestrator.images import BuiltImage

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
MATRIX = """\
schema: 1
name: containers
images: {cpu: {dockerfile: dockerfiles/cpu.Dockerfile}}
pools: {cpu: {image: cpu, device: cpu, isolation: docker, ray: none, slots: 1}}
models: {tiny: {config: examples/models/tiny-moe, dtype: float32}}
arms: {untuned: {configs: none}, tuned: {configs: tuned}}
defaults: {pools: [cpu], models: [tiny], timeout: 3m}
cells:
  - {kind: check}
  - {kind: kernel-test, ops: [fused_experts], dtypes: [float32]}
  - {kind: tune, effort: quick, batch_sizes: [2]}
  - {kind: kernel-bench, batch_sizes: [2]}
  - kind: serve
    moe_runner_backend: [triton]
    load: {requests: 2, concurrency: 2, input: 4, output: 4, seed: 1}
  - kind: serve
    moe_runner_backend: [auto]
    residency: both
    load: {requests: 2, concurrency: 2, input: 4, output: 4, seed: 1}
  - {kind: accuracy, samples: examples/samples/ocr-200.jsonl}
compare: {baseline: untuned, candidate: tuned, expect: no_regression, screen: 1, confirm: 1, futility: none}
gate: {metric: {serve: output_throughput}, margin: 1%}
"""


@pytest.fixture(scope="module")
def run(cpu_image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("containers")
    matrix = ROOT / "matrices" / f".containers-{os.getpid()}.yaml"
    matrix.write_text(MATRIX)
    try:
        argv = [sys.executable, "-P", "-m", "orchestrator", "run", str(matrix), "--out", str(folder / "run")]
        # Locks of its own: no timing is claimed here, so another run on this host need not be waited for.
        env = {**os.environ, "MOEGATE_LOCK_DIR": str(folder / "locks")}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=560, check=False)
    finally:
        matrix.unlink()
    # The gate may say anything of one pair; that every cell ran is what is asked here.
    assert done.returncode in (0, 1, 4), done.stdout + done.stderr
    return folder / "run"


def plan(run: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((run / "plan.json").read_text())["cells"]
    return cells


def results(run: Path, cell: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run / "cells" / cell).glob("attempt-*/result.json"))]


def test_every_kind_ran(run: Path) -> None:
    kinds = [(cell["kind"], results(run, cell["id"])) for cell in plan(run)]
    assert sorted(kind for kind, _ in kinds) == [
        "accuracy", "check", "kernel-bench", "kernel-test", "serve", "serve", "tune",
    ]  # fmt: skip
    for kind, found in kinds:
        assert found, kind
        assert all(result["status"] == "ok" and any(result["work"].values()) for result in found), kind


def test_what_ran_in_a_container_says_so(run: Path, cpu_image: BuiltImage) -> None:
    for cell in plan(run):
        for result in results(run, cell["id"]):
            if cell["kind"] == "check":  # on the host, by design
                continue
            assert result["detail"]["isolation"] == "docker", cell["kind"]
            # The interpreter is the image's, which the host's need not be.
            assert result["environment"]["python"] == cpu_image.python.split()[1], cell["kind"]


def test_two_containers_without_network_take_turns(run: Path) -> None:
    (cell,) = (cell for cell in plan(run) if cell["axes"].get("residency") == "both")
    first, second = results(run, cell["id"])[0]["launches"][:2]
    assert {first["arm"], second["arm"]} == {"untuned", "tuned"}
    for launch in (first, second):
        assert "output_throughput" in {samples["metric"] for samples in launch["samples"]}
        assert {len(samples["values"]) for samples in launch["samples"]} == {2}, launch["samples"]
    began, later = (datetime.fromisoformat(launch["started"]) for launch in (first, second))
    assert (later - began).total_seconds() < first["wall_s"], "the second was up before the first was over"


def test_both_arms_answered_the_same_samples(run: Path) -> None:
    (cell,) = (cell for cell in plan(run) if cell["kind"] == "accuracy")
    (result,) = results(run, cell["id"])
    assert result["work"] == {"samples": 400}
    assert len({launch["detail"]["input_sha256"] for launch in result["launches"]}) == 1
    assert "all 200 answers are the same" in (run / "report.html").read_text()


def test_what_the_image_is_made_of_is_recorded(run: Path, cpu_image: BuiltImage) -> None:
    (image,) = json.loads((run / "images" / "images.json").read_text())["images"]
    assert (image["name"], image["id"]) == ("cpu", cpu_image.id)
    assert any(package.startswith("torch==") for package in image["packages"])


def test_nothing_is_left(run: Path, client: Any) -> None:
    names = {json.loads((run / "plan.json").read_text())["name"]}
    left = client.containers.list(all=True, filters={"label": "moegate.run"})
    assert [c.labels for c in left if c.labels["moegate.run"].split("-")[0] in names] == []
