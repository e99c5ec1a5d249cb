"""A repository with a matrix that is right, for tests to edit."""

import shutil
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "standin" / "model"

GOOD = """\
schema: 1
name: demo
images:
  cpu: {dockerfile: cpu.Dockerfile}
pools:
  cpu: {device: cpu, image: cpu, ray: none}
models:
  tiny: {config: model, dtype: float32}
arms:
  untuned: {configs: none}
  tuned: {configs: tuned}
defaults: {pools: [cpu], models: [tiny], timeout: 2m}
cells:
  - kind: check
  - kind: tune
    effort: quick
  - kind: serve
    moe_runner_backend: [auto, triton]
    load: {requests: 2, concurrency: 2, input: 8, output: 8, seed: 1}
compare: {baseline: untuned, candidate: tuned, expect: improved, screen: 3, confirm: 8, futility: none}
gate: {metric: {serve: output_throughput}, margin: 1%}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "cpu.Dockerfile").write_text("FROM scratch\n")
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "matrix.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def good() -> str:
    return GOOD
