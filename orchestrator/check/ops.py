"""Config files of ops that no engine looks up: rules for their names and their values."""

from __future__ import annotations

from collections.abc import Iterator

from moegate import canonical, devices
from moegate.configs.positions import Positions
from moegate.configs.values import problems
from moegate.errors import UsageError
from moegate.records.findings import Finding, Severity
from orchestrator.check.files import MAX_BYTES, UNREADABLE_FIX, FileFacts
from orchestrator.check.optable import OpFiles
from orchestrator.check.rules import finding
from orchestrator.check.trees import Entry

__all__ = ["check_op"]


def check_op(op: OpFiles, entry: Entry, shown: str) -> tuple[FileFacts, list[Finding]]:
    """Read one file of `op` and say what is wrong with its name and its values; `shown` is its path in findings."""
    found = [*_name(op, entry.name, shown), *_values(op, entry, shown)]
    return FileFacts(entry, shown, None, {}, ""), found


def _name(op: OpFiles, name: str, shown: str) -> Iterator[Finding]:
    match = op.pattern.fullmatch(name)
    if match is None:
        yield finding("unparsable-name", shown, 1, f"{name!r:.200} is no file name of {op.op}", fix=op.example)
        return
    device, dtype = match["device"], match["dtype"]
    if dtype not in op.dtypes:
        words = f"nobody asks for dtype={dtype:.40}: {op.op} takes {', '.join(op.dtypes)}"
        yield finding("unreachable", shown, 1, words, fix=op.example)
    if not device:
        yield finding("empty-device", shown, 1, "device_name is empty: no device reports that")
    elif device in devices.FALLBACK_NAMES:
        words = f"{device} is what drivers call {devices.FALLBACK_NAMES[device]}"
        yield finding("fallback-device-name", shown, 1, words)
    elif not devices.is_field(device):
        near = ", ".join(devices.near(device, 2))
        words = f"no known device reports {device:.80} (near: {near}; the table is moegate/devices.py)"
        yield finding("unreachable", shown, 1, words)


def _values(op: OpFiles, entry: Entry, shown: str) -> Iterator[Finding]:
    """All but the order is an error: whoever looks the file up refuses it whole."""
    try:
        text = canonical.read_text(entry.path, MAX_BYTES)
    except UsageError as error:
        yield finding("bad-value", shown, 1, error.message, fix=UNREADABLE_FIX)
        return
    try:
        data = canonical.loads_json(text, file=shown)
    except UsageError as error:
        yield finding("bad-value", shown, error.line or 1, error.message, fix=error.fix)
        return
    lines = Positions(text).lines
    for wrong in problems(data, fields=op.fields, defaults=False):
        line = next((lines[wrong.path[:n]] for n in range(len(wrong.path), -1, -1) if wrong.path[:n] in lines), 1)
        severity: Severity | None = None if wrong.rule == "unsorted-keys" else "error"
        yield finding(wrong.rule, shown, line, wrong.message, fix=wrong.fix, severity=severity)
