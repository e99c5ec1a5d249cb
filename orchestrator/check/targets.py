"""The compile gate: what the compiler says of every config, asked of `tuner compile` in a process of its own.

The child needs Triton and torch and this process must not have them, so facts cross as JSON: one row per (file, batch
size, projection, target). What was compiled once is remembered by content: configs, target, Triton and our kernel.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moegate import canonical, devices, spawn
from moegate.configs import ConfigKey, parse_directory, parse_version
from moegate.configs.positions import line_of
from moegate.dispatch import platform_name
from moegate.errors import InfraError, UsageError
from moegate.extras import install
from moegate.kernels import code_hash
from moegate.paths import user_cache, write_atomic
from moegate.records.findings import Finding, Severity
from orchestrator.check.files import FileFacts
from orchestrator.check.rules import finding

_TIMEOUT_S = 3600.0
_USAGE = 2

Row = dict[str, Any]


@dataclass
class Compiled:
    """What the compile gate did: `kernels` of `files` for `targets`, of which `known` files were compiled before.

    seconds: what compiling the others took.
    """

    targets: tuple[str, ...]
    files: int = 0
    kernels: int = 0
    known: int = 0
    seconds: float = 0.0

    def sentence(self) -> str:
        """It in one line."""
        where = ", ".join(self.targets)
        if not self.files:
            return f"nothing compiled: no file to check is of a device of {where}"
        before = f", {self.known} of the files known from before" if self.known else ""
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return f"compiled {self.kernels} kernels of {files} for {where} in {self.seconds:.1f} s{before}"


def target_findings(facts: Iterable[FileFacts], done: Compiled, shown: Callable[[Path], str]) -> Iterator[Finding]:
    """Compile the configs of every file whose device has one of `done.targets`, and judge what came out.

    What was done is added to `done`.

    Raises:
        UsageError: a target that no device has, or an environment without `tuner compile`.
        InfraError: the child died.
    """
    wanted = {target for text in done.targets for target in _targets(text)}
    files = [file for file in facts if _device_target(file) in wanted and file.block_m]
    if not files:
        return
    triton = _triton()
    known = {file.shown: _recall(_key(file, triton)) for file in files}
    fresh = [file for file in files if known[file.shown] is None]
    began = time.monotonic()
    for file, rows in zip(fresh, _compile(fresh) if fresh else (), strict=True):
        known[file.shown] = rows
        write_atomic(_key(file, triton), json.dumps(rows))
    done.seconds += time.monotonic() - began if fresh else 0.0
    done.files, done.known = done.files + len(files), done.known + len(files) - len(fresh)
    for file in files:
        for row in known[file.shown] or []:
            done.kernels += row.get("status") != "skipped"
            yield from _judge(row, file, shown(file.entry.path))


def _targets(text: str) -> set[str]:
    """The targets of known devices that a word means: the one of that name, else all of a platform's."""
    compiled = [device for device in devices.DEVICES if device.vendor != "cpu"]
    known = {device.target for device in compiled}
    name = text.strip().lower()
    name = f"sm_{name.removeprefix('sm').removeprefix('_')}" if name.startswith("sm") else name
    if name in known:
        return {name}
    with contextlib.suppress(UsageError):
        platform = platform_name(text)
        if found := {device.target for device in compiled if device.platform == platform}:
            return found
    raise UsageError(
        f"no known device is one of {text!r:.60}", field="targets", fix=f"one of {', '.join(sorted(known))}"
    )


def _device_target(file: FileFacts) -> str | None:
    if file.parsed is None or not isinstance(file.parsed.key, ConfigKey):
        return None
    device = devices.find(file.parsed.key.device_name)
    return None if device is None else device.target


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise UsageError("triton is not installed here", field="targets", fix=install("cpu")) from None


def _key(file: FileFacts, triton: str) -> Path:
    """Where the facts of a file are remembered."""
    content = [file.digest, file.entry.name, _device_target(file), triton, code_hash()]
    return user_cache() / "compile" / f"{canonical.digest(content)}.json"


def _recall(path: Path) -> list[Row] | None:
    if not path.is_file():
        return None
    try:
        rows = canonical.load_json(path)
    except UsageError:
        return None
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else None


def _compile(files: list[FileFacts]) -> list[list[Row]]:
    """The rows of every file, in order."""
    targets = sorted({target for file in files if (target := _device_target(file)) is not None})
    places = {str(file.entry.path.absolute()): number for number, file in enumerate(files)}
    with tempfile.TemporaryDirectory(prefix="moegate-compile-") as temporary:
        rows = _run(Path(temporary), list(places), targets)
    out: list[list[Row]] = [[] for _ in files]
    for row in rows:
        number = places.get(str(row.get("file")))
        if number is not None:
            out[number].append(row)
    return out


def _run(folder: Path, files: list[str], targets: list[str]) -> list[Row]:
    listing, facts = folder / "files.json", folder / "facts.json"
    listing.write_text(json.dumps(files))
    argv = [sys.executable, "-P", "-m", "tuner", "compile", "--targets", ",".join(targets)]
    done = spawn.run(
        [*argv, "--files", str(listing), "--out", str(facts)],
        cwd=folder,
        env=spawn.child_env({}),
        stdout=folder / "stdout",
        stderr=folder / "stderr",
        timeout_s=_TIMEOUT_S,
    )
    said = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    if done.returncode == _USAGE:
        raise UsageError(f"`tuner compile` cannot run here: {said[0][:200]}", field="targets")
    if not facts.is_file():
        raise InfraError(f"`tuner compile` ended with {done.returncode}: {said[0][:200]}")
    content = canonical.load_json(facts)
    rows = content.get("facts") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise InfraError("`tuner compile` wrote no facts")
    return [row for row in rows if isinstance(row, dict)]


def _judge(row: Row, file: FileFacts, shown: str) -> Iterator[Finding]:
    size, target, triton = row.get("batch_size"), row.get("target"), str(row.get("triton") or "")
    line = row.get("line") or line_of(file.entry.path.read_text(encoding="utf-8"), (str(size),))
    severity, note = _trust(file.entry.directory, triton)
    # What nothing can be launched with came to no compiler, and may be of no batch size.
    where = f"{'' if size is None else f'batch size {size} on '}{target}{triton and f', Triton {triton}'}"
    if row.get("status") not in ("ok", "skipped"):
        why = row.get("error") or row.get("status")
        yield finding("compile-failed", shown, line, f"{where}: {why}{note}", severity=severity)
        return
    device = devices.find(file.parsed.key.device_name) if file.parsed else None
    limit, shared, spills = (None if device is None else device.smem_bytes), row.get("shared"), row.get("spills")
    if isinstance(shared, int) and limit is not None and device is not None and shared > limit:
        words = f"{where}: {shared} bytes of shared memory, {device.name} has {limit}{note}"
        yield finding("smem-exceeds", shown, line, words, severity=severity)
    if isinstance(spills, int) and spills > 0:
        yield finding("spills", shown, line, f"{where}: {spills} bytes spilled{note}")
    if row.get("block_loads") is False:
        yield finding("block-io-lost", shown, line, f"{where}: descriptor loads became plain loads{note}")


def _trust(directory: str, triton: str) -> tuple[Severity | None, str]:
    """Facts from another compiler than the file's Triton warn and never fail."""
    home = parse_directory(directory)
    try:
        same = home is None or parse_version(triton).numbers == home.numbers
    except UsageError:
        same = False
    return (None, "") if same else ("warning", triton and f" (the file is for Triton {home})")
