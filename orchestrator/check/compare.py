"""Config folders against their base: keys that lost their file, batch sizes that are gone, values that changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import ConfigKey, ParsedName, Resolution, parse_directory, parse_name
from moegate.configs.engines import EngineLookup, resolver
from moegate.configs.positions import line_of
from moegate.configs.values import is_batch_size, nearest
from moegate.errors import UsageError
from moegate.records.findings import Finding
from orchestrator.check.coverage import ORDER
from orchestrator.check.files import FileFacts, digest_of
from orchestrator.check.rules import finding
from orchestrator.check.trees import ConfigFolder, entries

_NO_TRITON = "0.0.0"
_SHOW = 4


@dataclass(frozen=True)
class _Side:
    """One side of the comparison: its folder and the files in it by relative path."""

    folder: Path
    files: Mapping[str, Path]
    resolve: Callable[..., Resolution]


def compare_folders(
    head: ConfigFolder,
    base: ConfigFolder,
    facts: Iterable[FileFacts],
    engine: EngineLookup,
    shown: Callable[[Path], str],
    triton: str | None = None,
) -> Iterator[Finding]:
    """Every change that a user of the configs can notice.

    Args:
        head, base: the folders. facts: what was read of the head's files, to recognise renamed ones.
        engine: whose lookup decides. shown: how a head path is printed.
        triton: judge every key under this version instead of the one its file was tuned on.
    """
    old, new = _side(base, engine), _side(head, engine)
    by_digest = {file.digest: file.shown for file in facts if file.digest}
    for name, path in old.files.items():
        parsed = parse_name(path.name)
        if parsed is None or not isinstance(parsed.key, ConfigKey):
            continue
        if name not in new.files:
            yield from _gone(name, path, parsed, old, new, shown(head.path / name), by_digest, triton)
        elif differ(path, new.files[name]):
            yield from _changed(path, new.files[name], shown(new.files[name]))
    for name, path in new.files.items():
        parsed = parse_name(path.name)
        if name not in old.files and parsed is not None and isinstance(parsed.key, ConfigKey):
            yield from _come(name, parsed, old, shown(path), triton)


def _side(folder: ConfigFolder, engine: EngineLookup) -> _Side:
    if not folder.path.is_dir():
        return _Side(folder.path, {}, resolver(engine.name, None))
    found = [entry for entry in entries(folder) if entry.kind == "file"]
    files = {(f"{e.directory}/{e.name}" if e.directory else e.name): e.path for e in found}
    return _Side(folder.path, files, resolver(engine.name, folder.path))


def _version(name: str, triton: str | None) -> str | None:
    if triton is not None:
        return triton
    if "/" not in name:
        return _NO_TRITON
    version = parse_directory(name.split("/", 1)[0])
    return None if version is None else str(version)


def _gone(
    name: str,
    path: Path,
    parsed: ParsedName,
    old: _Side,
    new: _Side,
    shown: str,
    by_digest: Mapping[str, str],
    triton: str | None,
) -> Iterator[Finding]:
    version = _version(name, triton)
    if version is None or not isinstance(parsed.key, ConfigKey):
        return
    before, after = _try(old, parsed, version), _try(new, parsed, version)
    if before is None or after is None or before.reason == "default":
        return
    moved = by_digest.get(digest_of(_load(path)))
    cause = f"; its content is now {moved}" if moved else ""
    key = f"{parsed.key.words}, {parsed.projection}"
    says = f"{key}: {before.reason} before, {_said(after)} now{cause}"
    if ORDER.index(after.reason) > ORDER.index(before.reason):
        yield finding("coverage-lost", shown, 1, says)
    elif after.file != before.file:
        yield finding("resolution-changed", shown, 1, says)


def _come(name: str, parsed: ParsedName, old: _Side, shown: str, triton: str | None) -> Iterator[Finding]:
    version = _version(name, triton)
    before = None if version is None else _try(old, parsed, version)
    if before is not None and before.file is not None and isinstance(parsed.key, ConfigKey):
        says = f"{parsed.key.words}, {parsed.projection}: {_said(before)} before, this file now"
        yield finding("resolution-changed", shown, 1, says, severity="note")


def _try(side: _Side, parsed: ParsedName, version: str) -> Resolution | None:
    try:
        return side.resolve(parsed.key, parsed.projection, version)
    except UsageError:
        return None


def _said(resolution: Resolution) -> str:
    return f"{resolution.reason} ({resolution.file})" if resolution.file else resolution.reason


def differ(one: Path, other: Path) -> bool:
    """Whether two files hold different bytes; yes where one of them cannot be read."""
    try:
        return canonical.read_file(one) != canonical.read_file(other)
    except UsageError:
        return True


def _load(path: Path) -> Any:
    try:
        return json.loads(canonical.read_text(path))
    except (UsageError, ValueError, RecursionError):
        return None


def _changed(base: Path, head: Path, shown: str) -> Iterator[Finding]:
    old, new = _load(base), _load(head)
    if not isinstance(old, dict) or not isinstance(new, dict):
        return
    text = head.read_text(encoding="utf-8")
    sizes = {int(key): value for key, value in new.items() if is_batch_size(key)}
    lost = [key for key in old if key not in new and is_batch_size(key)]
    for key in lost:
        served = f"batch size {nearest(sizes, int(key))}'s config serves it now" if sizes else "nothing serves it now"
        yield finding("coverage-lost", shown, 1, f"batch size {key} is gone: {served}")
    changes = [(key, text_) for key in new if (text_ := _entry_change(old.get(key), new[key], key)) is not None]
    if changes:
        words = "; ".join(text_ for _, text_ in changes[:_SHOW])
        more = f"; and {len(changes) - _SHOW} more batch sizes" if len(changes) > _SHOW else ""
        yield finding("resolution-changed", shown, line_of(text, (changes[0][0],)), words + more)


def _entry_change(old: Any, new: Any, key: str) -> str | None:
    if old == new:
        return None
    if old is None:
        return f"batch size {key} is new"
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"batch size {key} changed"
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return f"batch size {key}: " + ", ".join(f"{n} {old.get(n)} -> {new.get(n)}" for n in names)
