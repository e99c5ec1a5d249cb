"""A repository with a matrix that is right, for tests to edit."""

from pathlib import Path

import pytest

CONFIG = """{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
 "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 256, "n_routed_experts": 8,
 "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hidden_layers": 2, "moe_layer_freq": 1, "torch_dtype": "float32"}
"""

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
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(CONFIG)
    (tmp_path / "matrix.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def good() -> str:
    return GOOD
