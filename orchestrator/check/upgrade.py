"""What a Triton upgrade does to a tree: which keys stop being exact, where they fall, and what is at stake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moegate.configs import ConfigKey, parse_directory, parse_name, parse_version
from moegate.configs.engines import EngineLookup, resolver
from moegate.errors import UsageError
from moegate.records.findings import Finding
from orchestrator.check.gains import Gain
from orchestrator.check.rules import finding
from orchestrator.check.trees import ConfigFolder, entries


@dataclass(frozen=True)
class Fall:
    """One key of the tree under the new version. `home` is the directory it is exact in now."""

    key: ConfigKey
    projection: str
    home: str
    file: Path
    reason: str
    lands: str | None


def falls(
    folder: ConfigFolder, engine: EngineLookup, triton: str, current: str | None = None
) -> tuple[str | None, list[Fall]]:
    """(the version compared with, every key that is exact there, as it resolves under `triton`).

    Args:
        folder: the tree; a flat one has no versions and falls nowhere. engine: whose lookup decides.
        triton: the version to go to. current: the one in use, by default the newest that the tree has.

    Raises:
        UsageError: `triton` is no version, or the engine's own lookup would fail on this tree.
    """
    parse_version(triton)
    found = [
        entry for entry in entries(folder) if entry.kind == "file" and parse_directory(entry.directory) is not None
    ]
    if folder.flat or not found:
        return None, []
    versions = {entry.directory: parse_directory(entry.directory) for entry in found}
    newest = max(v for v in versions.values() if v is not None)
    now = current or str(newest)
    numbers = parse_version(now).numbers
    resolve = resolver(engine.name, folder.path)
    out: list[Fall] = []
    for entry in found:
        version, parsed = versions[entry.directory], parse_name(entry.name)
        if version is None or version.numbers != numbers or parsed is None or not isinstance(parsed.key, ConfigKey):
            continue
        answer = resolve(parsed.key, parsed.projection, triton)
        out.append(Fall(parsed.key, parsed.projection, entry.directory, entry.path, answer.reason, answer.file))
    return now, out


def upgrade_findings(
    folder: ConfigFolder, engine: EngineLookup, triton: str, gains: tuple[Gain, ...], shown: Callable[[Path], str]
) -> Iterator[Finding]:
    """One warning per key that is exact under the newest version of the tree and no longer under `triton`."""
    try:
        now, keys = falls(folder, engine, triton)
    except UsageError as error:
        yield finding("unparsable-triton-dir", shown(folder.path), 1, error.message, fix=error.fix)
        return
    for fall in keys:
        if fall.reason in ("exact", "alias"):
            continue
        where = f"{fall.reason} ({fall.lands})" if fall.lands else fall.reason
        says = (
            f"{fall.key.words}, {fall.projection}: exact under Triton {now}, {where} under {triton}{_cost(fall, gains)}"
        )
        yield finding(
            "resolution-changed", shown(fall.file), 1, says,
            fix=f"tune it again under Triton {triton} before the upgrade, or accept the older timing",
        )  # fmt: skip


def _cost(fall: Fall, gains: tuple[Gain, ...]) -> str:
    gain = next((g for g in gains if g.key == fall.key), None)
    if gain is None:
        return "; what that costs was not measured"
    return f"; its tuning was worth {gain.geomean:.2f}x ({gain.best:.2f}x at batch size {gain.best_batch})"
