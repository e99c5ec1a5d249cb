"""One call of `run`: take the directory, read what happened before, open the pools, schedule, and say how it ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from moegate import records
from moegate.entry import asked_to_end
from moegate.errors import InfraError, UsageError
from moegate.exits import Exit
from moegate.journal import Journal
from moegate.records import Plan
from moegate.stats import rules_of
from orchestrator.cells.base import PROGRAMS, Programs
from orchestrator.pools.isolation import Isolation
from orchestrator.pools.site import Site, open_site
from orchestrator.scheduler.core import Scheduler
from orchestrator.scheduler.progress import Progress
from orchestrator.scheduler.rundir import RunDir, fresh_id
from orchestrator.scheduler.state import run_id
from orchestrator.scheduler.trees import Trees
from orchestrator.sources import Sources

__all__ = ["Session", "execute"]


@dataclass(frozen=True)
class Session:
    """How a call ended. `executed` counts attempts that ran; `interrupted` is the signal's exit code, or None."""

    executed: int
    interrupted: Exit | None
    stop_reason: str


def execute(
    plan: Plan,
    path: Path,
    *,
    resume: bool,
    root: Path,
    isolation: str | None = None,
    programs: Programs = PROGRAMS,
    progress: Progress | None = None,
) -> Session:
    """Run a plan in a run directory.

    Args:
        plan: what to do; on resume it replaces the earlier plan.
        path: the run directory; new and empty, or with `resume` one of the same matrix.
        resume: go on where an earlier orchestrator ended, however it ended.
        root: the repository, for Dockerfiles and `git:` refs.
        isolation: `auto`, `docker` or `process` for all pools; None is what each pool says.
        programs: how our programs are started.
        progress: where events are printed; None prints to standard error.

    Raises:
        UsageError: the directory is of another matrix, or exists without `resume`.
        RunLocked: another orchestrator holds it.
        InfraError: the disk, or the run directory, refuses.
    """
    rundir = RunDir(path)
    if not resume:
        rundir.create()
    elif not path.is_dir():
        raise UsageError("does not exist, so there is nothing to resume", file=path, field="--resume")
    elif not rundir.resumable():
        raise UsageError("holds other files and no plan.json", file=path, field="--resume", fix="name a run directory")
    progress = progress or Progress(plan)
    with rundir.hold():
        if resume:
            plan = _take_over(plan, rundir, progress)
        rundir.sweep()
        rundir.cancel_file.unlink(missing_ok=True)
        records.write(rundir.plan_file, plan)
        try:
            with Journal.open(rundir.journal_file) as journal:
                return _session(plan, rundir, journal, root, isolation, programs, progress)
        finally:
            progress.close()


def _take_over(plan: Plan, rundir: RunDir, progress: Progress) -> Plan:
    """Compare with the earlier plan: the same matrix keeps its date, an edited one says what changed."""
    if not rundir.plan_file.is_file():
        return plan  # it died before it wrote one
    earlier = rundir.read_plan()
    if earlier.name != plan.name:
        raise UsageError(
            f"is a run of {earlier.name}, not of {plan.name}",
            file=rundir.path,
            field="--resume",
            fix="name its own folder",
        )
    ids = {cell.id for cell in plan.cells}
    gone = [cell.label for cell in earlier.cells if cell.id not in ids]
    if gone:
        progress.note(f"{len(gone)} cells of the earlier plan are not in this one: {', '.join(gone[:3])}")
    return replace(plan, created=earlier.created)


def _session(
    plan: Plan,
    rundir: RunDir,
    journal: Journal,
    root: Path,
    isolation: str | None,
    programs: Programs,
    progress: Progress,
) -> Session:
    run = run_id(journal.entries)
    if run is None:
        run = fresh_id()
        journal.append("run", run=run, matrix=plan.matrix_digest, version=plan.version, cells=len(plan.cells))
    else:
        journal.append("resume", matrix=plan.matrix_digest, version=plan.version, cells=len(plan.cells))
    opened = open_site(
        plan, isolation=isolation, root=root, logs=rundir.path / "images", say=progress.note, run=str(rundir.path)
    )
    with opened as site, Sources(root) as sources:
        _reap(site, run, progress)
        scheduler = Scheduler(
            plan, rundir, journal, site, run=run, rules=rules_of(plan), progress=progress,
            trees=Trees(rundir, root), sources=sources, programs=programs,
        )  # fmt: skip
        with _signals(scheduler.stop) as caught:
            try:
                scheduler.work()
            finally:
                _reap(site, run, None)
        journal.append("end", executed=scheduler.executed, stopped=scheduler.stop_reason)
    return Session(scheduler.executed, caught[0] if caught else None, scheduler.stop_reason)


def _reap(site: Site, run: str, progress: Progress | None) -> None:
    """End what an earlier orchestrator of this run, or a child that fled its group, left behind."""
    for isolation in site.kinds():
        try:
            ended = isolation.reap(run)
        except InfraError as error:
            ended = 0
            if progress is not None:
                progress.note(f"{isolation.name}: leftovers cannot be looked for: {error}")
        if ended and progress is not None:
            progress.note(f"ended {ended} leftover {_things(isolation)} of this run")


def _things(isolation: Isolation) -> str:
    return "containers" if isolation.name == "docker" else "processes"


@contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[list[Exit]]:
    """Turn SIGINT, SIGTERM and SIGHUP into a request to stop; the caught exit code is in the list."""
    caught: list[Exit] = []
    codes = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED, signal.SIGHUP: Exit.TERMINATED}

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        caught.append(codes[signal.Signals(number)])
        stop(f"stopped by {signal.Signals(number).name}")

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    # `nohup` has SIGHUP ignored, and that stays.
    wanted = [number for number in codes if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in wanted}
    asked = asked_to_end()
    if asked is not None:
        caught.append(asked)
        stop("stopped by a signal")
    try:
        yield caught
    finally:
        # Once asked to end, this process is ending: a second signal must not turn its exit code into another one, not
        # even while the interpreter shuts down, when handlers of its own are gone.
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if caught else earlier)
