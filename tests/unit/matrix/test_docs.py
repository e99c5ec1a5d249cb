"""docs/matrix.md names every key, and its example plans."""

import re
from pathlib import Path

from orchestrator.cells import KINDS
from orchestrator.matrix import load
from orchestrator.matrix.schema import Arm, Compare, Gate, Image, MatrixSpec, Model, Pool
from orchestrator.plan import build

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "matrix.md").read_text()


def test_every_key_is_explained():
    models = (MatrixSpec, Image, Pool, Model, Arm, Compare, Gate)
    keys = {field.alias or name for model in models for name, field in model.model_fields.items()}
    keys |= {name for kind in KINDS.values() for name in kind.spec.model_fields}
    words = set(re.findall(r"[a-z_]+", TEXT))
    assert keys <= words, keys - words


def test_every_kind_has_its_row_with_its_axes():
    for kind in KINDS.values():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{kind.name}` |"))
        assert {axis.key for axis in kind.axes} == set(re.findall(r"[a-z_]+", row.split("|")[2]))


def test_the_example_plans(tmp_path):
    example = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1]
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = tmp_path / "matrix.yaml"
    path.write_text(example.replace("examples/models", str(ROOT / "examples" / "models")))
    assert len(build(load(path)).cells) == 4
