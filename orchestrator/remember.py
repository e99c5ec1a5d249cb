"""Putting a run that has ended into the history, and what the history knew of its cells into the run's report."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from moegate.errors import MoegateError
from moegate.records import RunBundle
from orchestrator.history import History, run_id

__all__ = ["remember"]


def remember(bundle: RunBundle, rundir: Path, *, finished: bool = True) -> RunBundle:
    """Import a run that is `finished` and return it with its cells' earlier points, for its report.

    One that an orchestrator still works on is reported with its past, and imported when it ends.

    The file is $MOEGATE_HISTORY, or history.sqlite beside the run directory where that lies in a `runs` folder; else
    nothing is kept. A history that cannot be written costs a note, never the run.
    """
    named = os.environ.get("MOEGATE_HISTORY")
    if named is None and rundir.parent.name != "runs":
        return bundle
    path = Path(named) if named else rundir.parent / "history.sqlite"
    try:
        with History(path) as history:
            if finished:
                _add(history, bundle, rundir)
            others = history.aa_rate(without=run_id(bundle))
            return replace(bundle, history=history.earlier(bundle), aa_before=(others.events, others.trials))
    except (OSError, MoegateError) as error:
        return replace(bundle, notes=(*bundle.notes, f"not in the history: {error}"))


def _add(history: History, bundle: RunBundle, rundir: Path) -> None:
    """Import it. A report written again later, on another branch, does not move its run there."""
    known = next((row for row in history.runs(limit=-1) if row.id == run_id(bundle)), None)
    branch, revision = _where(rundir.parent) if known is None else (known.branch, known.revision)
    history.add(bundle, path=str(rundir), branch=branch, revision=revision)


def _where(folder: Path) -> tuple[str, str]:
    """Branch and revision: of the pull request or push in GitHub Actions, else of the checkout; empty for neither."""
    env = os.environ
    branch = (
        env.get("GITHUB_HEAD_REF") or env.get("GITHUB_REF_NAME") or _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    )
    return branch, env.get("GITHUB_SHA") or _git(folder, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
