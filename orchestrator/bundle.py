"""Read everything of a run back from its directory: plan, outcomes, results, and what else belongs to a report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from moegate import canonical, journal, records
from moegate.errors import UsageError
from moegate.records import Attempt, CellOutcome, Measurement, Plan, PlannedCell, ShellLine
from orchestrator.scheduler import RunDir, outcomes, read_cells
from orchestrator.scheduler.classify import tail
from orchestrator.scheduler.state import CellHistory

__all__ = ["RunFacts", "by_hand", "read_run"]

_MAX_CONFIG_FILES, _MAX_NAMES = 64, 10_000
_CONFIG_DEPTHS = tuple(
    f"{above}*device_name=*.json" for above in ("", "*/", "*/*/")
)  # flat, in a Triton's, in configs/
_LONGEST_PATH = 4096
_WORK = ("lease", "launch", "done", "final")  # kinds of journal entries, beside those that open and close a session


@dataclass(frozen=True)
class RunFacts:
    """A run as it lies on disk, before anything is compared."""

    plan: Plan
    outcomes: tuple[CellOutcome, ...]
    measurements: dict[str, tuple[Measurement, ...]]
    config_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: dict[str, tuple[ShellLine, ...]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    started: str = ""
    finished: str = ""


def read_run(path: Path) -> RunFacts:
    """Read a run directory, finished or not.

    Raises:
        UsageError: it is not a run directory, or its plan or journal cannot be believed.
    """
    rundir = RunDir(path)
    plan = rundir.read_plan()
    entries = journal.read(rundir.journal_file) if rundir.journal_file.is_file() else []
    cells = read_cells(entries)
    found: dict[str, tuple[Measurement, ...]] = {}
    notes = list(plan.warnings)
    problems: dict[str, str] = {}
    for cell in plan.cells:
        history = cells.get(cell.id)
        if history is None:
            continue
        try:
            found[cell.id] = tuple(_results(path, history))
        except UsageError as error:
            problems[cell.id] = str(error)
    tails = {cell.id: _log_tail(rundir, cells.get(cell.id)) for cell in plan.cells}
    return RunFacts(
        plan=plan,
        outcomes=_with_problems(outcomes(plan, cells, tails), problems),
        measurements=found,
        config_files=_config_files(rundir, plan),
        commands=_commands(path, plan.cells, cells),
        environment=_environment(found.values()),
        notes=tuple(notes),
        started=next((entry.time for entry in entries if entry.kind == "run"), plan.created),
        finished=_last_work(entries),
    )


def _last_work(entries: Sequence[journal.Entry]) -> str:
    """When the run last did something: to look at it again, and find nothing to do, does not make it newer."""
    return next((e.time for e in reversed(entries) if e.kind in _WORK), entries[-1].time if entries else "")


def _counted(history: CellHistory) -> list[Attempt]:
    """The attempts whose results count: the newest passed one of each stage, no confirmation of an older screen.

    Of a cell that failed it is the last attempt, for the report to show.
    """
    first = history.finished("screen") or history.finished("only")
    if first is None:
        return [attempt for attempt in history.attempts[-1:] if attempt.result is not None]
    confirm = history.finished("confirm")
    after = confirm is not None and confirm.number > first.number
    return [first, *([confirm] if confirm is not None and after else [])]


def _results(path: Path, history: CellHistory) -> Iterable[Measurement]:
    for attempt in _counted(history):
        if attempt.result is None:
            continue
        file = RunDir(path).result_file(history.cell, attempt.number, attempt.result, attempt.result_sha256)
        yield records.read(Measurement, file)


def _with_problems(found: tuple[CellOutcome, ...], problems: dict[str, str]) -> tuple[CellOutcome, ...]:
    """A finished cell whose result cannot be believed any more is an infrastructure failure, not a pass."""
    from dataclasses import replace

    return tuple(
        replace(outcome, state="INFRA_ERROR", reason=problems[outcome.cell]) if outcome.cell in problems else outcome
        for outcome in found
    )


def _log_tail(rundir: RunDir, history: CellHistory | None) -> str:
    if history is None or not history.attempts:
        return ""
    folder = rundir.attempt(history.cell, history.attempts[-1].number)
    return tail(folder / "stderr.log", 8 << 10)


def by_hand(command: Sequence[str], run: Path, cell: str, into: str = "") -> str:
    """The line for a shell that does what `command` did, and writes into the folder where it is typed.

    What a launch wrote into its own folder of the run would change a finished run, and the folder is gone: `"$PWD"`
    stands for it, or a folder `into` there, which the line makes. Nor does a server that shared its device wait for its
    turn: nobody would give it.
    """
    here = '"$PWD"' + (f"/{shlex.quote(into)}" if into else "")
    own = rf"/cells/{re.escape(cell)}/attempt-\d+/launch-\d+"
    folder, names = re.compile(rf"(?:{re.escape(str(run))}|/[^=:]*){own}"), re.compile(own)

    def shown(part: str) -> str:
        if len(part) > _LONGEST_PATH or not names.search(part):  # it names no folder of ours
            return shlex.quote(part)
        return here.join(shlex.quote(piece) if piece else "" for piece in folder.split(part))

    line = " ".join(shown(part) for part in command if not part.startswith("--turns="))
    return f"mkdir -p {shlex.quote(into)} && {line}" if into else line


def _commands(
    run: Path, cells: Iterable[PlannedCell], histories: dict[str, CellHistory]
) -> dict[str, tuple[ShellLine, ...]]:
    """What to type for each arm of a cell: the newest command of each. Two arms write into a folder each."""
    out = {}
    for cell in cells:
        history = histories.get(cell.id)
        newest: dict[str, Sequence[str]] = {}
        for attempt in reversed(history.attempts if history is not None else ()):
            arms = history.arms.get(attempt.number, ()) if history is not None else ()
            for arm, command in zip(arms, attempt.commands, strict=False):  # more launches than commands are noted
                newest.setdefault(arm if arm in cell.arms else "", command)
        ordered = sorted(newest, key=lambda arm: cell.arms.index(arm) if arm else -1)
        two = len(set(cell.arms)) > 1
        out[cell.id] = tuple(ShellLine(arm, by_hand(newest[arm], run, cell.id, arm if two else "")) for arm in ordered)
    return {cell: typed for cell, typed in out.items() if typed}


def _config_files(rundir: RunDir, plan: Plan) -> dict[str, dict[str, Any]]:
    """The config files of the arms: what this run tuned, and what directory arms hold, by their relative names."""
    trees = [(cell.id, rundir.configs(cell.id)) for cell in plan.cells if cell.kind == "tune"]
    trees += [(arm.name, Path(arm.configs)) for arm in plan.arms if arm.configs.startswith("/")]
    out: dict[str, dict[str, Any]] = {}
    for name, tree in trees:
        for file in _config_names(tree):
            if len(out) >= _MAX_CONFIG_FILES:
                return out
            try:
                content = canonical.load_json(file)
            except UsageError:
                continue
            if isinstance(content, dict):
                out[f"{name}/{file.relative_to(tree)}"] = content
    return out


def _config_names(tree: Path) -> list[Path]:
    """The config files of a tree, sorted: as deep as trees go, and as many as no tree has (a plan may say `/`)."""
    found = (file for pattern in _CONFIG_DEPTHS for file in tree.glob(pattern))
    try:
        names = [file for file in islice(found, _MAX_NAMES) if not file.name.endswith(".provenance.json")]
    except (OSError, ValueError, RuntimeError):  # what the plan names is no folder, or may not be looked at
        return []
    return sorted(names)


def _environment(measurements: Iterable[tuple[Measurement, ...]]) -> dict[str, str]:
    """What the cells' environments agree on; a value that differs between cells is listed with all its spellings."""
    values: dict[str, dict[str, None]] = {}
    for results in measurements:
        for result in results:
            for name, value in result.environment.items():
                values.setdefault(name, {})[value] = None
    return {name: " | ".join(found) for name, found in sorted(values.items())}
