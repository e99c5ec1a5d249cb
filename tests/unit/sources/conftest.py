"""A repository that looks like this project to whoever installs a commit of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "moegate"
version = "0.1.0"
[tool.setuptools]
include-package-data = false
packages = ["moegate", "moegate._configs", "moegate.stats", "xkernels", "xkernels.ops"]
[tool.setuptools.package-dir]
xkernels = "kernels/xkernels"
"moegate._configs" = "kernels/configs"
[tool.setuptools.package-data]
"*" = ["py.typed"]
"moegate._configs" = ["triton_*/*.json"]
"""
FILES = {
    "pyproject.toml": PROJECT,
    "moegate/__init__.py": "MARK = 'committed'\n",
    "moegate/py.typed": "",
    "moegate/notes.txt": "no package data\n",
    "moegate/stats/__init__.py": "",
    "kernels/configs/triton_3_8_0/E=8.json": "{}",
    "kernels/configs/README.md": "",
    "kernels/xkernels/__init__.py": "",
    "kernels/xkernels/ops/__init__.py": "",
    "kernels/xkernels/ops/unlisted/deep.py": "",
}

Commit = Callable[..., str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture
def commit(repository: Path) -> Commit:
    """Commit what the folder holds, after changes given as `name=content` (None removes); returns the SHA."""

    def make(changes: dict[str, str | None] | None = None) -> str:
        for name, content in (changes or {}).items():
            if content is None:
                (repository / name).unlink()
            else:
                (repository / name).parent.mkdir(parents=True, exist_ok=True)
                (repository / name).write_text(content)
        git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", "x", "--allow-empty"], check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    return make
