"""The compile gate: what the compiler says of every config, asked of `tuner compile` in a process of its own.

The child needs Triton and torch and this process must not have them, so facts cross as JSON: one row per (file, batch
size, projection, target) with `status`, `error`, `shared`, `spills`, `block_loads` and `triton`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from moegate import canonical, devices, spawn
from moegate.configs import ConfigKey, parse_directory, parse_version
from moegate.configs.positions import line_of
from moegate.dispatch import platform_name
from moegate.errors import InfraError, UsageError
from moegate.records.findings import Finding, Severity
from orchestrator.check.files import FileFacts
from orchestrator.check.rules import finding

_TIMEOUT_S = 3600.0
_COMMAND_MISSING = 2


def target_findings(
    facts: Iterable[FileFacts], targets: tuple[str, ...], shown: Callable[[Path], str]
) -> Iterator[Finding]:
    """Compile the configs of every file whose device has one of `targets`, and judge what came out.

    Raises:
        UsageError: a target that no device has, or an environment without `tuner compile`.
        InfraError: the child died.
    """
    wanted = {_target(text) for text in targets}
    files = [file for file in facts if _device_target(file) in wanted and file.block_m]
    if not files:
        return
    by_path = {str(file.entry.path): file for file in files}
    for row in _compile(list(by_path), sorted(wanted)):
        file = by_path.get(str(row.get("file")))
        if file is not None:
            yield from _judge(row, file, shown(file.entry.path))


def _target(text: str) -> str:
    platform_name(text)
    return (
        text.strip().lower().replace("sm", "sm_").replace("__", "_") if text.lower().startswith("sm") else text.lower()
    )


def _device_target(file: FileFacts) -> str | None:
    if file.parsed is None or not isinstance(file.parsed.key, ConfigKey):
        return None
    device = devices.find(file.parsed.key.device_name)
    return None if device is None else device.target


def _compile(files: list[str], targets: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="moegate-compile-") as temporary:
        folder = Path(temporary)
        listing, out = folder / "files.json", folder / "facts.json"
        listing.write_text(json.dumps(files))
        argv = [sys.executable, "-P", "-m", "tuner", "compile", "--targets", ",".join(targets), "--files", str(listing)]
        done = spawn.run(
            [*argv, "--out", str(out)], cwd=folder, env=spawn.child_env(dict(os.environ)), stdout=folder / "stdout",
            stderr=folder / "stderr", timeout_s=_TIMEOUT_S,
        )  # fmt: skip
        said = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        if done.returncode == _COMMAND_MISSING:
            raise UsageError(
                f"`tuner compile` cannot run here: {said[0][:200]}", field="targets", fix="install moegate[cpu]"
            )
        if not out.is_file():
            raise InfraError(f"`tuner compile` ended with {done.returncode}: {said[0][:200]}")
        content = canonical.load_json(out)
    rows = content.get("facts") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise InfraError("`tuner compile` wrote no facts")
    return [row for row in rows if isinstance(row, dict)]


def _judge(row: dict[str, Any], file: FileFacts, shown: str) -> Iterator[Finding]:
    size, target = str(row.get("batch_size")), row.get("target")
    line = line_of(file.entry.path.read_text(encoding="utf-8"), (size,))
    with_triton = str(row.get("triton") or "")
    severity, note = _trust(file.entry.directory, with_triton)
    where = f"batch size {size} on {target}, Triton {with_triton}"
    if row.get("status") not in (None, "ok", "skipped"):
        yield finding(
            "compile-failed", shown, line, f"{where}: {row.get('error') or row['status']}{note}", severity=severity
        )
        return
    limit = devices.find(file.parsed.key.device_name) if file.parsed else None
    shared = row.get("shared")
    if isinstance(shared, int) and limit is not None and limit.smem_bytes is not None and shared > limit.smem_bytes:
        words = f"{where}: {shared} bytes of shared memory, {limit.name} has {limit.smem_bytes}{note}"
        yield finding("smem-exceeds", shown, line, words, severity=severity)
    if isinstance(row.get("spills"), int) and row["spills"] > 0:
        yield finding("spills", shown, line, f"{where}: {row['spills']} bytes spilled{note}")
    if row.get("block_loads") is False:
        yield finding("block-io-lost", shown, line, f"{where}: descriptor loads became plain loads{note}")


def _trust(directory: str, triton: str) -> tuple[Severity | None, str]:
    """Facts from another compiler than the file's Triton warn and never fail."""
    home = parse_directory(directory)
    try:
        same = home is None or parse_version(triton).numbers == home.numbers
    except UsageError:
        same = False
    return (None, "") if same else ("warning", f" (the file is for Triton {home})")
