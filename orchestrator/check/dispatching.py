"""Dispatch as the check sees it: our own table against its lock, and an engine's source against its base."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.dispatch import lock
from moegate.dispatch.changes import compare
from moegate.dispatch.extract import WATCHES, Extraction, extract, shadows
from moegate.errors import UsageError
from moegate.records.findings import Finding
from orchestrator.check.base import GIT, Base, list_files, repository_of, show_file
from orchestrator.check.rules import finding

Shown = Callable[[Path], str]


def lock_findings(path: Path, shown: Shown) -> Iterator[Finding]:
    """Where the dispatch table answers differently than the lock file says: one finding per line of the lock."""
    text = canonical.read_text(path)
    seen: set[int] = set()
    before, now = lock.read(path), lock.table()
    for name, was, says in lock.family_changes(before, now):
        at = text.find(f'"{name}":')
        line = text.count("\n", 0, at) + 1 if at >= 0 else 1
        yield finding(
            "family-drift", shown(path), line, f"{name}: {was} before, {says} now",
            fix="undo the change, or accept it in the same pull request: `orchestrator dispatch lock`",
        )  # fmt: skip
    for change in lock.diff(before, now):
        line = lock.line_of(text, change)
        if line not in seen:
            seen.add(line)
            yield finding(
                "dispatch-changed", shown(path), line, change.words,
                fix="undo the change, or accept it in the same pull request: `orchestrator dispatch lock`",
            )  # fmt: skip


def accepted_changes(path: Path, base: Base) -> tuple[dict[str, Any], ...]:
    """Changes that the lock file accepts against the base's, with both chains, for reports."""
    before = base.locate(path)
    if before is None or not before.is_file():
        return ()
    changes = lock.diff(lock.read(before), lock.read(path))
    return tuple(
        {
            "op": c.op, "platform": c.platform, "problem": c.problem, "installed": c.installed, "request": c.request,
            "before": c.before, "after": c.after, "words": c.words,
        }
        for c in changes
    )  # fmt: skip


def source_findings(
    source: Path, engine: str | None, base: str | None, shown: Shown
) -> tuple[Extraction, list[Finding]]:
    """Read an engine's source; say which requests it shadows and, against a base, which rows changed.

    Args:
        source: the engine's tree. engine: its name, or None to find out. base: a directory, `git:REF`, or None.
        shown: how a path is printed.
    """
    head = extract(source, engine)
    found: list[Finding] = []
    for function in head.functions:
        if not function.watched.explicit_first:
            continue
        for row, why in shadows(function):
            found.append(
                finding(
                    "dispatch-changed",
                    shown(source / function.file),
                    row.line,
                    f"{function.name}: an explicit request is shadowed: {why}",
                    fix="move the branch behind the explicit check, into the automatic choice",
                )
            )
    if base is not None:
        found += _against(base, source, head, shown)
    return head, found


def _against(base: str, source: Path, head: Extraction, shown: Shown) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="moegate-source-") as temporary:
        folder = _lay_out(base, source, head.engine, Path(temporary))
        before = extract(folder, head.engine)
        for change in compare(before, head):
            gone = change.kind == "function-lost"
            file = _current_file(head, change.file) if gone else change.file
            yield finding(
                "dispatch-changed", shown(source / file), 1 if gone else change.line,
                f"{change.function}: {change.message} (against {base})",
                fix="check that the change is meant; the new order decides which kernel serves",
                severity="note" if change.kind == "function-added" else None,
            )  # fmt: skip


def _current_file(head: Extraction, file: str) -> str:
    return next((f.file for f in head.functions if f.file.endswith(file.rsplit("/", 1)[-1])), file)


def _lay_out(base: str, source: Path, engine: str, temporary: Path) -> Path:
    """The base's source: the directory itself, or the watched files of a git revision."""
    if not base.startswith(GIT):
        return Path(base)
    top, ref = repository_of(source), base.removeprefix(GIT)
    below = source.resolve().relative_to(top).as_posix()
    ends = tuple({"/" + watched.file for watched in WATCHES[engine]})
    names = [name for name in list_files(top, ref, below) if ("/" + name).endswith(ends)]
    if not names:
        raise UsageError(f"{ref} has no watched file of {engine} below {below}", field="base")
    for name in names:
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(show_file(top, ref, name))
    return temporary


def extraction_json(extraction: Extraction, found: list[Finding]) -> dict[str, Any]:
    """What `dispatch extract --json` prints."""
    return {
        "engine": extraction.engine,
        "functions": [
            {
                "function": f.name,
                "file": f.file,
                "line": f.line,
                "rows": [{"condition": r.condition, "target": r.target, "line": r.line} for r in f.rows],
                "shadowed": [{"line": row.line, "why": why} for row, why in shadows(f)],
            }
            for f in extraction.functions
        ],
        "missing": [f"{w.file}:{w.name}" for w in extraction.missing],
        "findings": [json.loads(json.dumps(vars(item))) for item in found],
    }
