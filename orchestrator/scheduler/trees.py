"""The config tree of each arm: found, or made once per run."""

from __future__ import annotations

from pathlib import Path

from moegate import canonical
from moegate.records import ArmSpec, PlannedCell
from orchestrator.plan.resolve import GIT
from orchestrator.scheduler.rundir import RunDir
from orchestrator.sources import unpack

__all__ = ["Trees"]

_CONFIGS = "kernels/configs"


class Trees:
    """Where the configs of arms lie. `root` is the repository that `git:` refs are read from."""

    def __init__(self, rundir: RunDir, root: Path) -> None:
        self._rundir, self._root = rundir, root
        self._digests: dict[str, str] = {}

    def path(self, arm: ArmSpec, cell: PlannedCell) -> Path | None:
        """The folder to give as `--configs`, or None for an empty tree."""
        if arm.configs == "none":
            return None
        if arm.configs == "tuned":
            return self._rundir.configs(cell.needs[0]).resolve()
        if arm.configs.startswith(GIT):
            return self._unpacked(arm.configs.removeprefix(GIT))
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

    def _unpacked(self, sha: str) -> Path:
        """The configs of a commit, unpacked below the run directory, once."""
        target = self._rundir.path / "sources" / f"{sha[:16]}-configs"
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            unpack(self._root, sha, [_CONFIGS], target)
        return target / _CONFIGS
