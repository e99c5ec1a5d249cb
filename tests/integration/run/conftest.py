"""A repository with a small matrix, and programs that are real children without torch."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.records import Plan
from orchestrator.cells.base import PYTHON, Programs
from orchestrator.matrix import load
from orchestrator.plan import build
from orchestrator.scheduler import Session, execute
from orchestrator.scheduler.progress import Progress

MODEL = Path(__file__).parents[2] / "standin" / "model"

SMALL = """\
schema: 1
name: small
pools:
  cpu: {device: cpu, ray: none, isolation: process}
models:
  tiny: {config: model, dtype: float32}
arms:
  untuned: {configs: none}
  tuned: {configs: tuned}
defaults: {pools: [cpu], models: [tiny], timeout: 20s}
cells:
  - kind: check
  - kind: kernel-test
    dtypes: [float32]
  - kind: tune
    effort: quick
  - kind: kernel-bench
    batch_sizes: [2]
  - kind: serve
    moe_runner_backend: [auto, triton]
    load: {requests: 2, concurrency: 2, input: 8, output: 8, seed: 1}
compare: {baseline: untuned, candidate: tuned, expect: improved, screen: 2, confirm: 3, futility: none}
gate: {metric: {serve: output_throughput}, margin: 1%, q: 0.2}
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time on one host must not wait for each other's devices."""
    monkeypatch.setenv("MOEGATE_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def programs() -> Programs:
    script = str(Path(__file__).with_name("fake_program.py"))
    return {name: (PYTHON, "-I", "-S", script, name) for name in ("orchestrator", "tuner", "serving")}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    shutil.copytree(MODEL, root / "model")
    (root / "pyproject.toml").touch()
    (root / "matrix.yaml").write_text(SMALL)
    return root


DRIVER = Path(__file__).with_name("driver.py")


class Run:
    """One run directory, run as often as a test likes."""

    def __init__(self, repository: Path, programs: Programs) -> None:
        self.repository, self.programs = repository, programs
        self.path = repository / "out"
        self.log = io.StringIO()

    def edit(self, *changes: tuple[str, str]) -> None:
        text = (self.repository / "matrix.yaml").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (self.repository / "matrix.yaml").write_text(text)

    def plan(self, *only: str) -> Plan:
        return build(load(self.repository / "matrix.yaml"), only=only)

    def start(self, *options: str, resume: bool = False) -> subprocess.Popen[str]:
        """The same in a process of its own, which a test may kill."""
        argv = [
            sys.executable,
            "-P",
            str(DRIVER),
            str(self.repository),
            str(self.path),
            *options,
            *(["--resume"] if resume else []),
        ]
        return subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
        )

    def __call__(self, *only: str, resume: bool = False) -> Session:
        plan = self.plan(*only)
        return execute(
            plan,
            self.path,
            resume=resume,
            root=self.repository,
            programs=self.programs,
            progress=Progress(plan, self.log),
        )


@pytest.fixture
def run(repository: Path, programs: Programs) -> Run:
    return Run(repository, programs)


@pytest.fixture
def states() -> Callable[[Path], dict[str, str]]:
    def read(path: Path) -> dict[str, str]:
        from orchestrator.bundle import read_run

        facts = read_run(path)
        labels = {cell.id: cell.label for cell in facts.plan.cells}
        return {labels[outcome.cell]: outcome.state for outcome in facts.outcomes}

    return read
