"""History: every finished run in one SQLite file, for trends and baselines. It informs; it never gates.

A number of another day is not a pair, so nothing here enters a verdict. Points of a trend belong together only while
branch, device class and fingerprint (device facts, host, versions, code-generation variables) stay the same: where the
fingerprint changes, the series starts anew and says what changed.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self

from moegate import canonical
from moegate.errors import InfraError, MoegateError, RecordError, UsageError
from moegate.records import CellVerdict, Measurement, RunBundle, TrendPoint, to_json
from moegate.stats import Rate, clopper_pearson

SCHEMA = 1

_TABLES = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, content TEXT NOT NULL, name TEXT NOT NULL, branch TEXT NOT NULL, revision TEXT NOT NULL,
    started TEXT NOT NULL, finished TEXT NOT NULL, exit INTEGER NOT NULL, sentence TEXT NOT NULL, path TEXT NOT NULL,
    imported TEXT NOT NULL
);
CREATE TABLE cells (
    run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, cell TEXT NOT NULL, label TEXT NOT NULL,
    kind TEXT NOT NULL, device_class TEXT NOT NULL, device TEXT NOT NULL, fingerprint TEXT NOT NULL,
    facts TEXT NOT NULL, control INTEGER NOT NULL, aa INTEGER NOT NULL, verdict TEXT, metric TEXT, unit TEXT,
    baseline REAL, candidate REAL, gain REAL, low REAL, high REAL, level REAL, pairs INTEGER,
    PRIMARY KEY (run, cell)
);
CREATE INDEX cells_by_cell ON cells(cell, device_class);
"""

# Of a bundle's environment, what the host is; the rest (branch, command, ...) may differ between comparable runs.
HOST_FACTS = frozenset({"kernel", "machine", "cpu", "cpus", "governor", "clocks", "nvidia", "amdgpu", "xe"})
_OWN_VERSIONS = frozenset({"moegate"})

_TYPES = {"str": (str,), "int": (int,), "str | None": (str, NoneType), "int | None": (int, NoneType),
          "float | None": (float, int, NoneType)}  # fmt: skip
# What SQLite says of the machine or of another process, not of the file.
_OF_THE_MACHINE = frozenset(
    {
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOLFS,
    }
)  # fmt: skip


@dataclass(frozen=True)
class RunRow:
    """One imported run."""

    id: str
    name: str
    branch: str
    revision: str
    started: str
    finished: str
    exit: int
    sentence: str
    path: str


@dataclass(frozen=True)
class CellRow:
    """One cell of one imported run. `changed` (in a trend) says what broke the series before this point.

    `control` and `aa` are 0 or 1, as they are stored.
    """

    run: RunRow
    cell: str
    label: str
    kind: str
    device_class: str
    device: str
    fingerprint: str
    facts: dict[str, str]
    control: int
    aa: int
    verdict: str | None
    metric: str | None
    unit: str | None
    baseline: float | None
    candidate: float | None
    gain: float | None
    low: float | None
    high: float | None
    pairs: int | None
    changed: str | None = None


class _Damaged(ValueError):
    """A row holds what we never write."""


def _said(error: Exception, path: Path) -> MoegateError:
    """What went wrong with the file, as one of our exceptions."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return InfraError(f"{path}: {error}: another process has it for long (fix: wait for its end, then again)")
    if isinstance(code, int) and code & 0xFF in _OF_THE_MACHINE:
        return InfraError(f"{path}: {error}")
    return RecordError(f"is not a history, or damaged: {error}", file=path)


class History:
    """The history file, open. Use as a context manager; safe for several processes.

    Queries are fetched whole: a cursor that an exception keeps would hold the file's lock beyond `close`.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            RecordError: it is damaged, or not a history of this schema; also later, within a `with` block.
            InfraError: another process holds it, or it cannot be read or written.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        except sqlite3.Error as error:
            raise _said(error, path) from None
        try:
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise _said(error, path) from None
        except RecordError:
            self._db.close()
            raise

    def _prepare(self) -> None:
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA}")
            elif version != SCHEMA:
                raise RecordError(
                    f"history schema {version} is not {SCHEMA}, the one this version reads", file=self.path
                )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has already rolled it back
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if isinstance(error, sqlite3.Error | _Damaged):
            raise _said(error, self.path) from None

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(self, bundle: RunBundle, *, path: str = "", branch: str | None = None, revision: str | None = None) -> bool:
        """Import a run; False where exactly this content is already there.

        A run is known by its plan; a run that went on since (resumed) replaces its earlier import. branch, revision:
        default to what the bundle's environment says.
        """
        env = bundle.environment
        known = {
            "name": bundle.plan.name,
            "branch": branch if branch is not None else env.get("branch", ""),
            "revision": revision if revision is not None else env.get("revision", ""),
            "started": bundle.started or bundle.plan.created,
            "finished": bundle.finished,
            "exit": bundle.gate.exit,
            "sentence": bundle.gate.sentence,
        }
        identity = run_id(bundle)
        rows = [_cell_row(identity, verdict, bundle) for verdict in bundle.comparison.cells]
        content = canonical.digest([known, rows])
        with self._transaction():
            found = self._db.execute("SELECT content FROM runs WHERE id = ?", (identity,)).fetchone()
            if found is not None and found["content"] == content:
                return False
            self._db.execute("DELETE FROM runs WHERE id = ?", (identity,))
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._insert("runs", {"id": identity, "content": content, **known, "path": path, "imported": now})
            for row in rows:
                self._insert("cells", row)
        return True

    def _insert(self, table: str, row: Mapping[str, Any]) -> None:
        columns = ", ".join(row)
        marks = ", ".join("?" * len(row))
        # Table and column names are ours, values are bound.
        self._db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(row.values()))  # noqa: S608

    def runs(self, *, branch: str | None = None, limit: int = 50) -> list[RunRow]:
        """Imported runs, newest first."""
        where, values = ("WHERE branch = ?", [branch]) if branch is not None else ("", [])
        query = f"SELECT * FROM runs {where} ORDER BY started DESC, id LIMIT ?"  # noqa: S608
        return [_run_row(row) for row in self._db.execute(query, (*values, limit)).fetchall()]

    def run(self, prefix: str) -> RunRow:
        """The run whose id starts so. Raises UsageError where none or several do."""
        found = [row for row in self.runs(limit=-1) if row.id.startswith(prefix)]
        if len(found) != 1 or not prefix:
            what = "no run" if not found else f"{len(found)} runs"
            raise UsageError(
                f"{what} in {self.path} has an id starting with {prefix!r}", fix="orchestrator history list"
            )
        return found[0]

    def cells(self, run: RunRow) -> list[CellRow]:
        """The cells of a run, by label."""
        query = "SELECT * FROM cells WHERE run = ? ORDER BY label, cell"
        return [_row_cell(row, run) for row in self._db.execute(query, (run.id,)).fetchall()]

    def trend(self, cell: str, *, branch: str | None = None, device_class: str | None = None) -> list[CellRow]:
        """Every measurement of a cell (id or label), oldest first; `changed` marks where the series starts anew."""
        query = (
            f"SELECT cells.*, {_RUN_COLUMNS} FROM cells JOIN runs ON runs.id = cells.run "  # noqa: S608
            "WHERE (cell = ? OR label = ?) AND (? IS NULL OR branch = ?) AND (? IS NULL OR device_class = ?) "
            "ORDER BY runs.started, runs.id"
        )
        values = (cell, cell, branch, branch, device_class, device_class)
        points = [_row_cell(row, _run_row(row, "run_")) for row in self._db.execute(query, values).fetchall()]
        return [_marked(point, points[i - 1] if i else None) for i, point in enumerate(points)]

    def aa_rate(self, *, branch: str | None = None, without: str = "") -> Rate:
        """How often A/A cells were flagged over all imported runs, with its exact 95 % interval.

        branch: only runs of this one. without: a run's id that is left out.
        """
        query = (
            "SELECT count(*), coalesce(sum(verdict IN ('improved', 'regressed')), 0) FROM cells "
            "JOIN runs ON runs.id = cells.run WHERE aa AND verdict IS NOT NULL AND (? IS NULL OR branch = ?) "
            "AND run != ?"
        )
        trials, events = self._db.execute(query, (branch, branch, without)).fetchone()
        return clopper_pearson(events, trials)

    def baseline(self, cell: str, *, branch: str, device_class: str, fingerprint: str) -> CellRow | str:
        """The newest measurement of a cell in a passing run of a branch, or why there is none that holds today."""
        points = [p for p in self.trend(cell, branch=branch, device_class=device_class) if p.gain is not None]
        passing = [point for point in points if point.run.exit == 0]
        if not passing:
            return f"no passing run of {branch or 'this branch'} measured it on {device_class}"
        newest = passing[-1]
        if newest.fingerprint != fingerprint:
            return f"the baseline of {newest.run.started} is no longer valid: the machine or its settings changed"
        return newest

    def earlier(self, bundle: RunBundle, *, limit: int = 30) -> dict[str, tuple[TrendPoint, ...]]:
        """For a report: earlier points of each cell of a run, same device class and fingerprint, oldest first."""
        own, result = run_id(bundle), {}
        for verdict in bundle.comparison.cells:
            row = _cell_row(own, verdict, bundle)
            points = [
                TrendPoint(p.run.id[:12], p.run.started, p.gain, p.low or 0.0, p.high or 0.0, p.verdict or "")
                for p in self.trend(verdict.cell, device_class=row["device_class"])
                if p.gain is not None and p.fingerprint == row["fingerprint"] and p.run.id != own
            ]
            if points:
                result[verdict.cell] = tuple(points[-limit:])
        return result


def run_id(bundle: RunBundle) -> str:
    """What a run is known by: its plan, which says when it was made."""
    plan = bundle.plan
    return canonical.digest([plan.name, plan.matrix_digest, plan.created, [cell.id for cell in plan.cells]])


def fingerprint(facts: Mapping[str, str]) -> str:
    """A short hash of the facts that make two runs comparable."""
    return canonical.digest(dict(facts))[:16]


def facts_of(measurements: tuple[Measurement, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """Everything that may move a number without anybody having changed the code under test."""
    facts = {f"host.{name}": value for name, value in environment.items() if name in HOST_FACTS}
    for measurement in measurements:
        host = measurement.detail.get("host")
        facts.update({f"host.{name}": str(value) for name, value in (host if isinstance(host, dict) else {}).items()})
        facts.update({k: v for k, v in measurement.environment.items() if k not in _OWN_VERSIONS})
        for launch in measurement.launches[:1]:
            device = launch.device
            facts |= {"device.name": device.name, "device.arch": device.arch, "device.driver": device.driver}
            if launch.proof is not None:
                facts["engine"] = launch.proof.engine
    return facts


def _cell_row(run: str, verdict: CellVerdict, bundle: RunBundle) -> dict[str, Any]:
    measurements = tuple(bundle.measurements.get(verdict.cell, ()))
    facts = facts_of(measurements, bundle.environment)
    effect = verdict.effect
    kind = next((m.device.kind for m in measurements), "")
    return {
        "run": run,
        "cell": verdict.cell,
        "label": verdict.label,
        "kind": verdict.kind,
        "device_class": f"{kind}:{facts.get('device.name', '')}" if kind else "",
        "device": verdict.device,
        "fingerprint": fingerprint(facts),
        "facts": canonical.dumps(facts),
        "control": int(verdict.control),
        "aa": int(verdict.aa),
        "verdict": verdict.verdict,
        "metric": effect.metric if effect else None,
        "unit": effect.unit if effect else None,
        "baseline": effect.baseline_median if effect else None,
        "candidate": effect.candidate_median if effect else None,
        "gain": effect.gain if effect else None,
        "low": effect.gain_low if effect else None,
        "high": effect.gain_high if effect else None,
        "level": effect.level if effect else None,
        "pairs": effect.pairs if effect else None,
    }


_RUN_COLUMNS = ", ".join(f"runs.{name} AS run_{name}" for name in RunRow.__dataclass_fields__)


def _values(row: sqlite3.Row, kind: type, prefix: str = "") -> dict[str, Any]:
    """The columns of a row that a record has, each of its type."""
    values = {}
    for name, field in kind.__dataclass_fields__.items():  # type: ignore[attr-defined]
        allowed = _TYPES.get(field.type)
        if allowed is None or name == "changed":  # not a column
            continue
        try:
            value = values[name] = row[prefix + name]
        except IndexError:
            raise _Damaged(f"there is no column {name}") from None
        if not isinstance(value, allowed) or (isinstance(value, float) and not math.isfinite(value)):
            raise _Damaged(f"{name} is {str(value)[:40]!r}")
    return values


def _run_row(row: sqlite3.Row, prefix: str = "") -> RunRow:
    return RunRow(**_values(row, RunRow, prefix))


def _row_cell(row: sqlite3.Row, run: RunRow) -> CellRow:
    try:
        facts = canonical.loads_json(str(row["facts"]))
    except (UsageError, IndexError):
        facts = None
    if not isinstance(facts, dict):
        raise _Damaged(f"the facts of cell {str(row['cell'])[:40]} are not what we write")
    return CellRow(run=run, facts={name: str(value) for name, value in facts.items()}, **_values(row, CellRow))


def _marked(point: CellRow, before: CellRow | None) -> CellRow:
    """The point with what changed since the one before it, where the series breaks."""
    if before is None or before.fingerprint == point.fingerprint:
        return point
    names = sorted(n for n in before.facts.keys() | point.facts.keys() if before.facts.get(n) != point.facts.get(n))
    what = "; ".join(f"{n}: {before.facts.get(n, 'unset')} -> {point.facts.get(n, 'unset')}" for n in names)
    return CellRow(**{**{n: getattr(point, n) for n in CellRow.__dataclass_fields__}, "changed": what})


def row_json(row: RunRow | CellRow) -> dict[str, Any]:
    """A row as plain JSON values."""
    value: dict[str, Any] = to_json(row)
    return value


def open_history(path: Path) -> History:
    """Open a history that exists. Raises UsageError where there is none."""
    if not path.is_file():
        raise UsageError("no such history", file=path, fix="orchestrator history import RUNDIR")
    return History(path)
