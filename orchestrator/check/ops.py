"""Config files of ops that no engine looks up: one table row per op, its file names and its values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moegate import canonical, devices
from moegate.configs.positions import Positions
from moegate.configs.values import STORE_FIELDS, Field, problems
from moegate.errors import UsageError
from moegate.records.findings import Finding, Severity
from orchestrator.check.files import MAX_BYTES, UNREAD, FileFacts
from orchestrator.check.rules import finding
from orchestrator.check.trees import Entry

__all__ = ["OPS", "check_op"]


@dataclass(frozen=True)
class OpFiles:
    """The files of one op as `tuner.emit` writes them: `shape` names their numbers, `dtypes` what is stored."""

    op: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    fields: tuple[Field, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """What a file name has to be."""
        numbers = "".join(f",{name}=[1-9][0-9]{{0,8}}" for name in self.shape)
        return re.compile(rf"{self.op}{numbers},device_name=(?P<device>[^,]*),dtype=(?P<dtype>[^,]+)\.json")

    @property
    def example(self) -> str:
        """A name in words."""
        numbers = "".join(f",{name}=.." for name in self.shape)
        return f"name it {self.op}{numbers},device_name=..,dtype={'|'.join(self.dtypes)}.json"


OPS: Mapping[str, OpFiles] = {
    row.op: row
    for row in (OpFiles("store_kv_cache", ("heads", "dim"), ("float32", "float16", "bfloat16"), STORE_FIELDS),)
}


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
        text = canonical.read_file(entry.path, MAX_BYTES).decode()
    except (UsageError, UnicodeDecodeError) as error:
        words = error.message if isinstance(error, UsageError) else f"is not UTF-8: byte {error.start}"
        yield finding("bad-value", shown, 1, words, fix=UNREAD)
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
