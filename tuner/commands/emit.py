"""`tuner emit`: tuned files in the spelling and with the fields of an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from moegate import canonical
from moegate.configs import ConfigKey, ConfigTree, TreeFile, format_name
from moegate.configs.names import Spelling
from moegate.configs.values import refused_by
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import Provenance, read, write
from moegate.records.provenance import sidecar_name
from tuner.commands.common import print_json
from tuner.config import Config, Scalar
from tuner.emit import file_entry, write_file
from tuner.places import CONFIGS, ensure_place

__all__ = ["run"]

_TARGETS: Mapping[str, Spelling] = {spelling: spelling for spelling in get_args(Spelling)}


@dataclass
class _File:
    """One file to write: where it comes from, its entries, the fields left out, and the provenance to take along."""

    source: str
    path: Path
    entries: dict[int, dict[str, Scalar]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    record: Provenance | None = None

    def write(self, target: Spelling) -> None:
        """Write it, and what tells of it: whose kernel the times are from does not change with the spelling."""
        write_file(self.path, self.entries)
        if self.record is None:
            return
        carried = [f"{name} was stripped for {target}" for name in sorted(self.dropped)]
        detail = {
            **self.record.detail, "notes": [*self.record.detail.get("notes", []), *carried], "emitted_for": target
        }  # fmt: skip
        digest = canonical.file_digest(self.path)
        write(
            self.path.with_name(sidecar_name(self.path.name)),
            replace(self.record, config_sha256=digest, detail=detail),
        )


def run(*, target: str, source: Path, out: Path, as_json: bool) -> int:
    """Rewrite every fused-MoE file below `source` for `target`; the process exit code.

    Nothing is written where one of the files is damaged or has no place.

    Raises:
        UsageError: there is nothing to write, or two files would become one.
    """
    spelling = _TARGETS.get(target)
    if spelling is None:
        raise UsageError(f"unknown engine {target!r}", field="--for", fix=f"one of {', '.join(_TARGETS)}")
    files, notes = _planned(source, out, spelling)
    for file in files:
        file.write(spelling)
    for note in notes:
        print(note, file=sys.stderr)
    written = [str(file.path) for file in files]
    if as_json:
        document: dict[str, Any] = {"written": written, "notes": notes}
        print_json(document)
    else:
        for line in written:
            print(f"wrote {line}")
    return Exit.OK


def _planned(source: Path, out: Path, target: Spelling) -> tuple[list[_File], list[str]]:
    """The files to write, each with a place of its own, and what is left out, in words."""
    tree = ConfigTree(source)
    files: dict[Path, _File] = {}
    notes: list[str] = []
    emptied = False
    for item in tree.files():
        file, words = _file(tree, item, out, target)
        notes += words
        if file is None:
            continue
        if not file.entries:
            emptied = True
            continue
        if (other := files.get(file.path)) is not None:
            raise UsageError(
                f"{other.source} and {file.source} would both become {file.path.name}", file=source,
                fix="name the folder of one version of Triton, or put one of them elsewhere",
            )  # fmt: skip
        files[file.path] = file
    if not files:
        lacks = f"nothing that {target}'s kernel takes" if emptied else "no fused-MoE config file"
        raise UsageError(f"holds {lacks}", file=source)
    for path in files:
        ensure_place(path)
        ensure_place(path.with_name(sidecar_name(path.name)))
    return list(files.values()), notes


def _file(tree: ConfigTree, item: TreeFile, out: Path, target: Spelling) -> tuple[_File | None, list[str]]:
    """One file of the tree as it is to be written, None where the engine has no such file; and notes."""
    if item.parsed is None or not isinstance(item.parsed.key, ConfigKey):
        return None, [f"{item.path}: skipped, its name is no fused-MoE config's"]
    if item.parsed.backend is not None:
        return None, [f"{item.path}: skipped, it is for the kernel of {item.parsed.backend}"]
    if target == "vllm" and item.parsed.projection == "down":
        return None, [f"{item.path}: left out, vLLM reads one file for both projections"]
    name = format_name(item.parsed.key, item.parsed.projection, target)
    file = _File(item.path, out / name if target == "vllm" else out / CONFIGS / item.directory / name)
    notes = []
    for size, entry in tree.load(item.path).items():
        if refused := refused_by(target, entry):
            words = ", ".join(refused)
            notes.append(f"{item.path}: batch size {size} was left out, {target}'s kernel takes no {words}")
            continue
        file.entries[size], dropped = file_entry(Config.of(entry), target)
        file.dropped.update(dropped)
    if not file.entries:
        return file, notes
    notes += [f"{item.path}: {lost} was stripped: {target}'s loader drops it" for lost in sorted(file.dropped)]
    kept = tree.path(item.path)
    sidecar = kept.with_name(sidecar_name(kept.name))
    if sidecar.is_file():
        file.record = read(Provenance, sidecar)
        if file.record.engine != target:
            other = file.record.engine
            notes.append(f"{kept.name}: timed on {other}'s kernel; {target}'s may want another config")
    return file, notes
