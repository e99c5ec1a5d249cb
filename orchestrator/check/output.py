"""Findings for people and machines: text, JSON, and a Measurement for check cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from moegate import devices
from moegate.records import Case, DeviceIdentity, Measurement, to_json
from moegate.records.findings import CheckResult, Finding
from moegate.text import plain
from orchestrator.check.rules import BY_ID, RULES
from orchestrator.check.targets import Compiled

_COLOURS: Mapping[str, str] = {"error": "\x1b[31;1m", "warning": "\x1b[33m", "note": "\x1b[36m"}
_DIM, _OFF = "\x1b[2m", "\x1b[0m"
_TOP = 12


def as_json(result: CheckResult) -> dict[str, Any]:
    """The document that `--json` prints."""
    return {
        "findings": [to_json(item) for item in result.findings],
        "counts": result.counts,
        "files": result.files,
        "coverage": list(result.coverage),
        "accepted": list(result.accepted),
        "unchecked": result.detail.get("unchecked", {}),
        "compiled": result.detail.get("compiled"),
    }


def as_text(result: CheckResult, *, colour: bool = False, limit: int = 0) -> str:
    """Grouped by rule, one line each, with what to do; a verdict at the end.

    Args:
        result: what was found. colour: with ANSI colours. limit: findings shown per rule, 0 for all.
    """
    lines: list[str] = []
    for rule, group in groupby(result.findings, key=lambda item: item.rule):
        items = list(group)
        paint = _COLOURS[items[0].severity] if colour else ""
        off, dim = (_OFF, _DIM) if colour else ("", "")
        lines.append(f"{paint}{items[0].severity}: {rule}{off} ({len(items)}) {BY_ID[rule].explanation}")
        shown = items[:limit] if limit else items
        fixes = {item.fix for item in items}
        for item in shown:
            fix = f" {dim}(fix: {item.fix}){off}" if len(fixes) > 1 else ""
            lines.append(f"  {item.file}:{item.line}: {plain(item.message)}{fix}")
        if len(items) > len(shown):
            lines.append(f"  and {len(items) - len(shown)} more")
        if len(fixes) == 1:
            lines.append(f"  {dim}fix: {items[0].fix}{off}")
        lines.append("")
    lines += list(_coverage(result.coverage)) + list(_accepted(result.accepted))
    if compiled := result.detail.get("compiled"):
        lines.append(Compiled(**compiled).sentence())
    lines.append(verdict(result))
    return "\n".join(lines) + "\n"


def verdict(result: CheckResult) -> str:
    """The last line: how many files, how many findings, and whether the check fails."""
    by_severity = {name: sum(item.severity == name for item in result.findings) for name in _COLOURS}
    said = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in by_severity.items() if count)
    others = "".join(f"; not checked: {count} of {op}" for op, count in result.detail.get("unchecked", {}).items())
    ends = "; the check fails" if result.failed else ""
    files = f"{result.files} config file{'' if result.files == 1 else 's'}"
    return f"{files}: {said or 'no finding'}{others}{ends}"


def _coverage(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        return
    said_of = (devices.unknown(name) for name in dict.fromkeys(row["device"] for row in listed))
    yield from (f"note: {unknown}" for unknown in said_of if unknown)
    yield f"coverage of {len(listed)} combinations, most worth tuning first:"
    for row in listed[:_TOP]:
        gain = f"{row['expected_gain']:.2f}x {row['gain_from']}" if row["expected_gain"] else row["gain_from"]
        up, down = row["up"], row["down"]
        said = f"up {up}, down {down}" if row["reachable"] else f"unreachable: {row['why']}"
        yield f"  {row['key']} ({row['model']}, tp {row['tp']}, ep {row['ep']}): {said}; {gain}"
    if len(listed) > _TOP:
        yield f"  and {len(listed) - _TOP} more (--json has all)"
    yield ""


def _accepted(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    listed = list(rows)
    if listed:
        yield f"dispatch changes that the lock file accepts: {len(listed)}"
        yield from (f"  {row['words']}" for row in listed)
        yield ""


def as_measurement(result: CheckResult) -> Measurement:
    """The result of a `check` cell: every error is a failed case."""
    cases = tuple(_case(item) for item in result.findings)
    errors = [item for item in result.findings if item.severity == "error"]
    return Measurement(
        kind="check",
        status="failed" if errors else "ok",
        device=DeviceIdentity("cpu", "cpu", "cpu:host"),
        environment={},
        work={"files": result.files, "rules": len(RULES)},
        cases=cases,
        failure=f"{len(errors)} errors: {errors[0].message}" if errors else None,
        detail={"counts": result.counts},
    )


def _case(item: Finding) -> Case:
    status = "failed" if item.severity == "error" else "passed"
    detail = {"severity": item.severity, "fix": item.fix}
    return Case(f"{item.rule}: {item.file}:{item.line}", status, item.message, detail)  # type: ignore[arg-type]
