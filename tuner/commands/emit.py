"""`tuner emit`: tuned files in the spelling and with the fields of an engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import ConfigKey, ConfigTree, format_name
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import Provenance, read, write
from moegate.records.provenance import sidecar_name
from tuner.commands.common import print_json
from tuner.config import Config, Scalar
from tuner.emit import file_entry, write_file

__all__ = ["run"]

_TARGETS = ("sglang", "vllm")


def run(*, target: str, source: Path, out: Path, as_json: bool) -> int:
    """Rewrite every fused-MoE file below `source` for `target`; the process exit code."""
    if target not in _TARGETS:
        raise UsageError(f"unknown engine {target!r}", field="--for", fix=f"one of {', '.join(_TARGETS)}")
    tree = ConfigTree(source)
    written: list[str] = []
    notes: list[str] = []
    emptied = False
    for item in tree.files():
        if item.parsed is None or not isinstance(item.parsed.key, ConfigKey):
            notes.append(f"{item.path}: skipped, its name is no fused-MoE config's")
            continue
        if target == "vllm" and item.parsed.projection == "down":
            notes.append(f"{item.path}: left out, vLLM reads one file for both projections")
            continue
        name = format_name(item.parsed.key, item.parsed.projection, "vllm" if target == "vllm" else "sglang")
        path = out / name if target == "vllm" else out / "configs" / item.directory / name
        entries: dict[int, dict[str, Scalar]] = {}
        dropped: set[str] = set()
        for size, entry in tree.load(item.path).items():
            if target == "vllm" and entry.get("BLOCK_SIZE_M") == 1:
                notes.append(f"{item.path}: batch size {size} was left out, vLLM's kernel takes no blocks of one row")
                continue
            entries[size], lost = file_entry(Config.of(entry), target)
            dropped.update(lost)
        if not entries:
            emptied = True
            continue
        write_file(path, entries)
        written.append(str(path))
        notes += [f"{item.path}: {field} was stripped: {target}'s loader drops it" for field in sorted(dropped)]
        note = _carry(tree.path(item.path), path, target, sorted(dropped))
        notes += [note] if note else []
    if not written and emptied:
        raise UsageError(f"holds blocks of one row alone, which {target}'s kernel does not take", file=source)
    if not written:
        raise UsageError("holds no fused-MoE config file", file=source)
    for note in notes:
        print(note, file=sys.stderr)
    if as_json:
        document: dict[str, Any] = {"written": written, "notes": notes}
        print_json(document)
    else:
        for line in written:
            print(f"wrote {line}")
    return Exit.OK


def _carry(source: Path, path: Path, target: str, dropped: list[str]) -> str | None:
    """Take the provenance along: whose kernel the times are from does not change with the spelling."""
    sidecar = source.with_name(sidecar_name(source.name))
    if not sidecar.is_file():
        return None
    record = read(Provenance, sidecar)
    carried = [f"{field} was stripped for {target}" for field in dropped]
    detail = {**record.detail, "notes": [*record.detail.get("notes", []), *carried], "emitted_for": target}
    digest = canonical.file_digest(path)
    write(path.with_name(sidecar_name(path.name)), replace(record, config_sha256=digest, detail=detail))
    if record.engine != target:
        return f"{source.name}: timed on {record.engine}'s kernel; {target}'s may want another config"
    return None
