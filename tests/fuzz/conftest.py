"""What mutation starts from: a repository with matrices, and a run directory of a real, quick run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `repo`, a small repository, and `run`, a finished run of it with one cell of each kind."""
    folder = tmp_path_factory.mktemp("fuzz")
    argv = [sys.executable, "-P", str(ROOT / "tests/faults/harness"), "sweep", "--every=1000000", f"--keep={folder}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120, env=env)
    (folder / "reference-small-1").rename(folder / "run")
    for name in ("examples", "matrices", "dockerfiles"):
        (folder / "repo" / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def run(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may damage."""
    return Path(shutil.copytree(workshop / "run", tmp_path / "run"))
