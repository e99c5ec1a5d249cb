"""Compile in another environment: for targets whose Triton cannot share one with ours (Intel's replaces it).

The other Python needs torch, numpy and its Triton, nothing of ours: our packages are put behind its own on its path,
so that it keeps its Triton. It reads a job from standard input and writes rows, one JSON document, to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate.errors import UsageError
from tuner.compile.targets import Target, find, missing

__all__ = ["Foreign", "main"]

Row = dict[str, Any]
_START = "import sys, json; sys.path += json.loads(sys.argv[1]); from tuner.compile.foreign import main; main()"
_LIMIT_S = 3600.0
_CPP = "libstdc++.so.6"  # triton-xpu builds a helper that uses it and does not link it


@dataclass(frozen=True)
class Foreign:
    """Another environment, by its Python interpreter."""

    python: Path

    def __post_init__(self) -> None:
        # A name without a folder would be looked for on the PATH. Links stay: they are what makes it the environment's.
        object.__setattr__(self, "python", self.python.absolute())
        if not self.python.is_file() or not os.access(self.python, os.X_OK):
            raise UsageError(f"{self.python} is no Python interpreter", field="--python", fix="venv/bin/python")

    def reason(self, target: Target) -> str | None:
        """Why this environment cannot compile for a target either; None if it can."""
        answer = self._ask({"ask": "missing", "target": target.name})
        return None if answer is None else f"{self.python}: {answer}"

    def variants(self, target: Target, names: Sequence[str], jobs: int) -> list[Row]:
        """Facts of every kernel of the named variants, as `run.compile_variants` gives them."""
        rows: list[Row] = self._ask({"ask": "variants", "target": target.name, "names": list(names), "jobs": jobs})
        return rows

    def jobs(self, target: Target, work: Mapping[str, Row], jobs: int,
             progress: Callable[[str], None]) -> dict[str, Row]:  # fmt: skip
        """Facts of compile jobs by key, as `run.compile_jobs` gives them."""
        progress(f"{target.name}: {len(work)} configs in {self.python}")
        rows: dict[str, Row] = self._ask({"ask": "jobs", "target": target.name, "work": dict(work), "jobs": jobs})
        return rows

    def _ask(self, job: Row) -> Any:
        with tempfile.TemporaryDirectory(prefix="moegate-compile-") as folder:
            out = Path(folder) / "rows.json"
            argv = [str(self.python), "-P", "-c", _START, json.dumps(_roots()), str(out)]
            env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
            env.setdefault("LD_PRELOAD", _CPP)
            try:
                done = subprocess.run(argv, input=json.dumps(job), env=env, encoding="utf-8", errors="replace",
                                      capture_output=True, timeout=_LIMIT_S, check=False)  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                raise UsageError(f"{self.python} did not answer: {error}", field="--python") from error
            if not out.is_file():
                said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                raise UsageError(f"{self.python} cannot compile: {said[:300]}", field="--python",
                                 fix="an environment with torch, numpy and the target's Triton")  # fmt: skip
            try:
                return json.loads(out.read_text(encoding="utf-8"))
            except ValueError:
                raise UsageError(f"{self.python} did not answer in JSON", field="--python") from None


def _roots() -> list[str]:
    """Folders that hold our packages."""
    import moegate
    import tuner
    import xkernels

    return sorted({str(Path(str(package.__file__)).parents[1]) for package in (moegate, tuner, xkernels)})


def main() -> None:
    """Answer one job in the other environment."""
    from tuner.compile.run import compile_jobs, compile_variants

    job, out = json.load(sys.stdin), Path(sys.argv[2])
    target = find(job["target"])
    answer: Any
    if job["ask"] == "missing":
        answer = missing(target)
    elif job["ask"] == "variants":
        answer = compile_variants([target], job["names"], job["jobs"], _tell)
    else:
        answer = compile_jobs(target, job["work"], job["jobs"], _tell)
    out.write_text(json.dumps(answer), encoding="utf-8")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
