"""Which configs the look-up gives an op in this process, batch size by batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import ConfigTree
from moegate.configs.values import DENSE_FIELDS, STORE_FIELDS, is_batch_size, launch_problems, nearest
from moegate.errors import UsageError
from moegate.records import ConfigUse
from tuner.emit import single_name
from tuner.places import DENSE
from tuner.problem import Problem, Projection

__all__ = ["Found", "Lookup", "lookup"]

(_SPLIT,) = STORE_FIELDS


@dataclass(frozen=True)
class Found:
    """The config of every projection at one batch size, and the record of where each came from."""

    configs: Mapping[Projection, Mapping[str, Any]]
    uses: tuple[ConfigUse, ...]


@dataclass(frozen=True)
class Lookup:
    """A tree of config files as one op sees it. `root` is the folder that was read, None for none."""

    root: Path | None
    at: Callable[[int], Found] = field(repr=False)

    @property
    def digest(self) -> str:
        """Hash over the files; empty for none."""
        return "" if self.root is None else canonical.tree_digest(self.root)


def lookup(problem: Problem, root: Path | None, device_name: str, triton: str,
           default: Callable[[int], Mapping[str, Any] | None]) -> Lookup:  # fmt: skip
    """What `problem` runs with below `root` (None: no files) on a device.

    Args:
        triton: version that will run; files of the experts lie in a folder per version.
        default: the launcher's own config of an op of one kernel, by batch size.

    Raises:
        UsageError: the folder does not exist, or the file that answers is damaged.
    """
    if problem.op == "fused_experts":
        return _experts(problem, root, device_name, triton)
    return _single(problem, root, device_name, default)


def _experts(problem: Problem, root: Path | None, device_name: str, triton: str) -> Lookup:
    tree = ConfigTree(root)
    pair = tree.resolve_pair(problem.key(device_name), triton=triton)

    def at(size: int) -> Found:
        up, down = pair.for_batch(size, problem.topk)
        uses = tuple(
            ConfigUse(problem.op, found.projection, size, found.file, found.reason, config, found.alias)
            for found, config in ((pair.up, up), (pair.down, down))
        )
        return Found({"up": up, "down": down}, uses)

    return Lookup(tree.root, at)


def _single(
    problem: Problem, root: Path | None, device_name: str, default: Callable[[int], Mapping[str, Any] | None]
) -> Lookup:
    """One file, as `tuner.emit` writes it; its folder has no Triton versions."""
    if root is not None and not root.is_dir():
        raise UsageError("is no folder", file=root, fix="name a folder of config files, or `none`")
    folder = root / DENSE if root is not None and (root / DENSE).is_dir() else root
    name = single_name(problem, device_name)
    path = None if folder is None else folder / name
    entries = _entries(problem, path) if path is not None and path.is_file() else {}

    def at(size: int) -> Found:
        config = dict(entries[nearest(entries, size)] if entries else default(size) or {})
        use = ConfigUse(problem.op, "main", size, name if entries else None, "exact" if entries else "default", config)
        return Found({"main": config}, (use,))

    return Lookup(folder, at)


def _entries(problem: Problem, path: Path) -> dict[int, dict[str, Any]]:
    found = canonical.load_json(path)
    if problem.op == "block_fp8_linear":
        for wrong in launch_problems(found, fields=DENSE_FIELDS):
            raise UsageError(wrong.message, file=path, fix=wrong.fix)
        return {int(size): dict(entry) for size, entry in found.items()}
    rows = found.items() if isinstance(found, dict) else ()
    entries = {int(key): entry for key, entry in rows if is_batch_size(key)}
    if not entries or len(entries) != len(found) or not all(map(_is_split, entries.values())):
        raise UsageError("is no file of this op", file=path, fix='{"1": {"num_split": 1}, ...}')
    return entries


def _is_split(entry: object) -> bool:
    """Whether an entry holds `num_split` alone, and that one that can be started."""
    return isinstance(entry, dict) and list(entry) == [_SPLIT.name] and _SPLIT.accepts(entry[_SPLIT.name])
