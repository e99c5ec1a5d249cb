"""A matrix is public: what looks like a secret in it is refused at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegate.errors import UsageError
from orchestrator.matrix import load

MATRIX = """\
schema: 1
name: leaky
images: {{i: {{dockerfile: Dockerfile, {image}}}}}
pools: {{cpu: {{device: cpu, image: i}}}}
arms:
  one:
    env: {{{arm}}}
cells: [{{kind: kernel-test, pools: [cpu]}}]
"""


@pytest.mark.parametrize(
    ("image", "arm", "line"),
    [
        ("env: {HF_TOKEN: abc}", "", 3),
        ("args: {API_KEY: abc}", "", 3),
        ("", "DB_PASSWORD: abc", 7),
        ("", "ANYTHING: ghp_0123456789abcdefghijABCDEFGHIJ", 7),
    ],
)
def test_a_secret_in_a_matrix_is_refused_at_its_line(tmp_path: Path, image: str, arm: str, line: int) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(MATRIX.format(image=image, arm=arm))
    with pytest.raises(UsageError, match="looks like a secret") as error:
        load(file)
    assert error.value.line == line
    assert "ghp_" not in str(error.value)


def test_a_variable_about_tokens_is_none(tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(MATRIX.format(image="env: {TOKENIZERS_PARALLELISM: 'false'}", arm="MAX_TOKENS_PER_STEP: '8'"))
    load(file)
