"""The run directory: where everything of a run lies, who holds it, and how it is read again.

plan.json  journal  lock  cancel    decided, done, held, asked to stop
cells/<id>/attempt-N/               result.json stdout.log stderr.log
images/  sources/                   build logs; configs of commits that arms name
configs/<tune id>/                  what a tune cell wrote, moved here once the cell has passed
comparison.json gate.json report.html junit.xml results.sarif summary.md
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from moegate import canonical, records
from moegate.errors import InfraError, RecordError, RunLocked, UsageError
from moegate.locks import FileLock, Held, holder_of, spoken
from moegate.paths import is_file, is_folder, remove_folder
from moegate.records import Plan
from moegate.records.plan import MOST_CELLS

__all__ = ["MAX_RESULT_BYTES", "RunDir", "fresh_id", "newest"]

MAX_RESULT_BYTES = 32 << 20
"""A result beyond this is none: it is neither written nor, from wherever it came, read."""
_CELL_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,126}")
MOST_GLOBS = 1_000
"""Rules of a plan that are held against each of its cells."""

_ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory. Nothing is created before it is needed."""

    path: Path

    @property
    def plan_file(self) -> Path:
        """`plan.json`."""
        return self.path / "plan.json"

    @property
    def journal_file(self) -> Path:
        """`journal`."""
        return self.path / "journal"

    @property
    def cancel_file(self) -> Path:
        """A file whose existence asks the running orchestrator to stop (`orchestrator cancel`)."""
        return self.path / "cancel"

    def cell(self, cell: str) -> Path:
        """The folder of a cell."""
        return self.path / "cells" / cell

    def attempt(self, cell: str, number: int) -> Path:
        """The folder of one attempt."""
        return self.cell(cell) / f"attempt-{number}"

    def configs(self, cell: str) -> Path:
        """The tree that a tune cell wrote."""
        return self.path / "configs" / cell

    def sweep(self) -> None:
        """Remove files that an orchestrator was writing when it was killed; only for who holds the directory."""
        _remove_half_written(self.path)

    def sweep_cell(self, cell: str, output: str, *, resumable: bool) -> None:
        """Remove what attempts of a cell that were cut off left behind, before its end is written.

        output: folder of a launch from which a later attempt can go on; it stays where the cell is `resumable`.
        """
        for attempt in self.cell(cell).glob("attempt-*"):
            _remove_half_written(attempt)
            remove_folder(attempt / output)  # finished, and yet never published
            for launch in attempt.glob("launch-*"):
                if not (resumable and is_folder(launch / output)):
                    remove_folder(launch)

    def last_attempt(self, cell: str) -> int:
        """The highest attempt number on disk, 0 for none."""
        folder = self.cell(cell)
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        return max((int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))), default=0)

    def read_plan(self) -> Plan:
        """Read `plan.json`. Raises UsageError where this is no run directory."""
        if not self.plan_file.is_file():
            raise UsageError(
                "is not a run directory: it holds no plan.json", file=self.path, fix="name a folder of runs/"
            )
        plan = records.read(Plan, self.plan_file)
        globs = len(plan.gate.required) + len(plan.gate.quarantine)
        for number, most, what in ((len(plan.cells), MOST_CELLS, "cells"), (globs, MOST_GLOBS, "globs of the gate")):
            if number > most:
                raise RecordError(f"has {number:,} {what}; at most {most:,} are read", file=self.plan_file)
        for cell in plan.cells:  # they name folders
            if not _CELL_ID.fullmatch(cell.id):
                raise RecordError(f"{cell.id[:80]!r} cannot be the id of a cell", file=self.plan_file)
        return plan

    def result_file(self, cell: str, number: int, said: str, sha256: str | None) -> Path:
        """The result of a finished attempt, which is still what the journal says of it.

        Raises:
            UsageError: it is said to lie elsewhere, is missing or no plain file, too large, or was changed.
        """
        path = self.attempt(cell, number) / "result.json"
        if not _CELL_ID.fullmatch(cell) or said != path.relative_to(self.path).as_posix():
            what = f"attempt {number} of {cell[:80]!r} cannot have its result in {said[:100]!r}"
            raise UsageError(what, file=self.journal_file)
        if not is_file(path) or path.is_symlink():
            raise UsageError("the result of a finished attempt is missing, or may not be looked at", file=path)
        if sha256 is not None and canonical.file_digest(path, MAX_RESULT_BYTES) != sha256:
            raise UsageError("the result of a finished attempt was changed after it was measured", file=path)
        return path

    def resumable(self) -> bool:
        """Whether a run began here: there is a plan, or nothing but what an orchestrator makes before it."""
        if self.plan_file.is_file():
            return True
        early = (self.journal_file.name, "lock", self.cancel_file.name)
        return all(name in early or name.startswith(".plan.json.") for name in os.listdir(self.path))  # noqa: PTH208

    def hold(self) -> FileLock:
        """Take the run directory for this process.

        Raises:
            RunLocked: another orchestrator has it.
        """
        for pause in (0.05, 0.1, None):  # a `status` that looks just now holds it for an instant
            try:
                return FileLock(self.path / "lock", run=str(self.path)).acquire()
            except Held as error:
                if pause is None:
                    raise RunLocked(
                        f"{self.path} is held by another orchestrator: {spoken(error.holder)} (fix: wait for its end, "
                        f"or end it with `orchestrator cancel {shlex.quote(str(self.path))}`, then --resume goes on; "
                        "or name another folder with --out)"
                    ) from None
                time.sleep(pause)
        raise AssertionError

    def holder(self) -> str | None:
        """What the orchestrator that holds the directory says about itself, or None where nobody does."""
        return holder_of(self.path / "lock")

    def create(self) -> None:
        """Make the folder, or say why it cannot be one.

        Raises:
            UsageError: it exists and holds something.
            InfraError: the file system refuses.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = any(self.path.iterdir())
        except FileExistsError:
            raise UsageError("exists and is not a folder", file=self.path, field="--out") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UsageError(str(error.strerror), file=self.path, field="--out", fix="a shorter name") from None
            raise InfraError(f"{self.path}: cannot be made: {error.strerror}") from None
        holder = self.holder()
        if holder is not None:
            raise UsageError(
                f"another orchestrator runs there: {spoken(holder)}", file=self.path, field="--out",
                fix="name another folder, or wait for its end and add --resume",
            )  # fmt: skip
        if taken:
            raise UsageError(
                "exists and is not empty", file=self.path, field="--out", fix="add --resume, or name another folder"
            )
        if not os.access(self.path, os.W_OK):
            raise InfraError(f"{self.path}: is not writable")


def _remove_half_written(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):  # what `moegate.paths.write_atomic` makes and renames
        path.unlink(missing_ok=True)


def fresh_id() -> str:
    """A new run id: what processes and containers of the run are marked with."""
    return secrets.token_hex(8)


def newest(runs: Path, name: str) -> Path | None:
    """The newest run directory of a matrix name below `runs/`, or None."""
    found: list[tuple[float, Path]] = []
    for folder in runs.iterdir() if is_folder(runs) else ():
        if not is_file(folder / "plan.json") or not folder.name.startswith(f"{name}-"):
            continue
        try:
            plan = records.read(Plan, folder / "plan.json")
        except UsageError:
            continue
        if plan.name == name:
            found.append((folder.stat().st_mtime, folder))
    return max(found)[1] if found else None
