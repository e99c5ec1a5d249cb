"""The config tree and the source of each arm: found, or made once per run."""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

from moegate import canonical
from moegate.errors import InfraError
from moegate.records import ArmSpec, PlannedCell
from orchestrator.plan.resolve import GIT
from orchestrator.scheduler.rundir import RunDir

__all__ = ["Trees"]

_CONFIGS = "kernels/configs"


class Trees:
    """Where the configs of arms lie. `root` is the repository that `git:` refs and sources are read from."""

    def __init__(self, rundir: RunDir, root: Path) -> None:
        self._rundir, self._root = rundir, root
        self._digests: dict[str, str] = {}
        self._arms: dict[str, ArmSpec] = {}

    def path(self, arm: ArmSpec, cell: PlannedCell) -> Path | None:
        """The folder to give as `--configs`, or None for an empty tree."""
        if arm.configs == "none":
            return None
        if arm.configs == "tuned":
            return self._rundir.configs(cell.needs[0]).resolve()
        if arm.configs.startswith(GIT):
            return self._archive(arm.configs.removeprefix(GIT), _CONFIGS)
        return Path(arm.configs)

    def digest(self, arm: ArmSpec, cell: PlannedCell) -> str:
        """The content of the arm's tree, for keys; read once."""
        if arm.configs == "none" or arm.configs.startswith(GIT):
            return arm.configs
        name = cell.needs[0] if arm.configs == "tuned" else arm.configs
        if name not in self._digests:
            path = self.path(arm, cell)
            self._digests[name] = canonical.tree_digest(path) if path else ""
        return self._digests[name]

    def forget(self, cell: str) -> None:
        """A tune cell wrote its tree anew."""
        self._digests.pop(cell, None)

    def arm(self, arm: ArmSpec) -> ArmSpec:
        """The arm with the environment that makes its own source the one that is imported."""
        if arm.source is None:
            return arm
        if arm.name not in self._arms:
            root = self._archive(arm.source, "")
            path = f"{root}:{root / 'kernels'}"
            self._arms[arm.name] = replace(arm, env={**arm.env, "PYTHONPATH": path})
        return self._arms[arm.name]

    def _archive(self, sha: str, folder: str) -> Path:
        """Unpack a commit (or one folder of it) below the run directory, once."""
        target = self._rundir.path / "sources" / (sha[:16] + ("-configs" if folder else ""))
        if not target.is_dir():
            argv = ["git", "-C", str(self._root), "archive", "--format=tar", sha, *([folder] if folder else [])]
            done = subprocess.run(argv, capture_output=True, check=False, timeout=300, stdin=subprocess.DEVNULL)
            if done.returncode != 0:
                raise InfraError(
                    f"git archive {sha[:12]} {folder}: {done.stderr.decode(errors='replace').strip()[:300]}"
                )
            partial = target.with_name(target.name + ".partial")
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(partial, filter="data")
            partial.rename(target)
        return target / folder if folder else target
