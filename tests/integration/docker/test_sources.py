"""An arm with a `source` in a container: installed by the image's interpreter, mounted read-only, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.images import BuiltImage

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
KERNEL = "kernels/xkernels/ops/_details/common.py"
MATRIX = """\
schema: 1
name: sources
images: {{cpu: {{dockerfile: dockerfiles/cpu.Dockerfile}}}}
pools: {{cpu: {{image: cpu, device: cpu, isolation: docker, ray: none}}}}
models: {{tiny: {{config: examples/models/tiny-moe, dtype: float32}}}}
arms: {{image: {{}}, commit: {{source: {sha}}}}}
cells:
  - {{kind: accuracy, pools: cpu, models: tiny, moe_runner_backend: torch, samples: {samples}, timeout: 3m}}
compare: {{baseline: image, candidate: commit, screen: 1, confirm: 1, futility: none}}
"""


def changed_commit(scratch: Path) -> str:
    """HEAD with one kernel file changed, as a commit that no branch names: the work tree and its image stay equal."""
    env = {**os.environ, "GIT_INDEX_FILE": str(scratch / "index")}
    for name in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{name}_NAME": "t", f"GIT_{name}_EMAIL": "t@example.org"}

    def git(*argv: str, text: str | None = None) -> str:
        done = subprocess.run(["git", *argv], cwd=ROOT, env=env, input=text, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("read-tree", "HEAD")
    blob = git("hash-object", "-w", "--stdin", text=git("show", f"HEAD:{KERNEL}") + "\n\nMARK = 1\n")
    git("update-index", "--cacheinfo", f"100644,{blob},{KERNEL}")
    return git("commit-tree", git("write-tree"), "-p", "HEAD", "-m", "A kernel that differs")


@pytest.fixture(scope="module")
def run(cpu_image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image holds against a commit whose kernels differ, by the answers of two servers."""
    folder = tmp_path_factory.mktemp("sources")
    matrix = ROOT / "matrices" / f".sources-{os.getpid()}.yaml"
    samples = folder / "samples.jsonl"
    samples.write_text("".join((ROOT / "examples/samples/ocr-200.jsonl").read_text().splitlines(keepends=True)[:4]))
    matrix.write_text(MATRIX.format(sha=changed_commit(folder), samples=samples))
    argv = [sys.executable, "-P", "-m", "orchestrator", "run", str(matrix), "--out", str(folder / "out")]
    env = {**os.environ, "MOEGATE_LOCK_DIR": str(folder / "locks"), "XDG_CACHE_HOME": str(folder / "cache")}
    try:
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=380, check=False)
    finally:
        matrix.unlink()
    assert done.returncode in (0, 1, 4), done.stdout + done.stderr
    return folder / "out"


def launches(run: Path, kind: str) -> dict[str, dict[str, Any]]:
    result = json.loads(next(run.glob(f"cells/{kind}-*/attempt-1/result.json")).read_text())
    assert result["status"] == "ok"
    assert result["detail"]["isolation"] == "docker"
    return {launch["arm"]: {**launch, "versions": result["environment"]} for launch in result["launches"]}


def test_each_arm_runs_its_own_kernels(run: Path) -> None:
    """A server is a grandchild of its launch: it must be the commit's too."""
    found = launches(run, "accuracy")
    sha = found["commit"]["detail"]["source"]
    hashes = {arm: launch["proof"]["kernel_hash"] for arm, launch in found.items()}
    assert hashes["image"] != hashes["commit"]
    (environment,) = (run.parent / "cache/moegate/sources").glob(f"{sha}-*/")
    assert hashes["commit"] == json.loads((environment / "moegate-source.json").read_text())["kernel_hash"]
    assert found["commit"]["versions"]["moegate"].count(f"+g{sha[:12]}") == 1


def test_the_environment_was_made_by_the_images_interpreter(run: Path) -> None:
    (environment,) = (run.parent / "cache/moegate/sources").glob("*/")
    assert "/opt/moegate" in next(environment.glob("lib/python3*/site-packages/interpreter.pth")).read_text()
    assert f"--volume={environment}:{environment}:ro" in (run / "journal").read_text()
