"""A tree of config files, and moegate's lookup in it, with the reason for every answer.

Per Triton directory (exact, then older descending, then newer ascending): the device's own name, then its reviewed
aliases. A down projection without a file of its own uses the up config without TMA. What nothing answers gets the
default config. There is no silent answer: `Resolution.reason` says which of these it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from moegate import devices
from moegate.configs.defaults import default_config, vllm_default_config
from moegate.configs.names import ConfigKey, ParsedName, Projection, format_name, parse_name
from moegate.configs.values import TILE, Engine, Value, load_config, nearest
from moegate.configs.versions import directory_name, parse_directory, search_order
from moegate.errors import UsageError

Reason = Literal["exact", "alias", "older-triton", "newer-triton", "up-config", "default"]

# Where a host TensorDescriptor becomes hardware block loads; elsewhere USE_TMA only costs.
TMA_PLATFORMS = frozenset({"cuda-sm90", "cuda-sm100", "cuda-sm120", "xpu-bmg"})

FLAT = ""
"""The directory name of files that lie in a flat folder (vLLM's layout): no Triton version applies."""


@dataclass(frozen=True)
class Resolution:
    """What one projection's lookup found.

    `file` is relative to the tree's root (`root`, where it is known); `alias` is the other device name that lent it;
    `searched` lists every name that was tried, in order; `configs` maps batch sizes to parameters and is empty where
    the default applies.
    """

    key: ConfigKey
    projection: Projection
    file: str | None
    reason: Reason
    alias: str | None = None
    searched: tuple[str, ...] = ()
    configs: Mapping[int, Mapping[str, Value]] = field(default_factory=dict)
    engine: Engine = "moegate"
    root: Path | None = field(default=None, compare=False, repr=False)

    def for_batch(self, batch_size: int, topk: int = 1) -> dict[str, Value]:
        """The parameters for `batch_size` rows: the nearest batch size's, or the engine's default config."""
        if not self.configs and self.engine == "vllm":
            return vllm_default_config(self.key, batch_size, topk)
        if not self.configs:
            return default_config(self.key, batch_size)
        return dict(self.configs[nearest(self.configs, batch_size)])

    def ensure_tile(self, entry: Mapping[str, Value], batch_size: int) -> None:
        """Raise UsageError where what is to be launched at a batch size lacks a side of its tile."""
        for name in TILE:
            if name not in entry:
                size = nearest(self.configs, batch_size)
                file = self.root / self.file if self.root and self.file else self.file
                raise UsageError(f"batch size {size} has no {name}", file=file, fix=f"add {name}")


@dataclass(frozen=True)
class Pair:
    """Both projections of one layer, as they run together."""

    up: Resolution
    down: Resolution

    def for_batch(
        self, batch_size: int, topk: int | None = None, *, tma: bool | None = None
    ) -> tuple[dict[str, Value], dict[str, Value]]:
        """The parameters of (up, down) for `batch_size` rows.

        Both projections run over one sorting of the tokens: the down config takes the up config's BLOCK_SIZE_M.

        Args:
            batch_size: rows of hidden states (M).
            topk: experts per token; only vLLM's default for weight-only int4 looks at it.
            tma: whether the device turns descriptors into block loads; None asks the device table (an unknown
                device keeps what its file says).

        Raises:
            UsageError: a file leaves out a side of the tile.
        """
        up, down = self.up.for_batch(batch_size, topk or 1), self.down.for_batch(batch_size, topk or 1)
        self.up.ensure_tile(up, batch_size)
        down["BLOCK_SIZE_M"] = up["BLOCK_SIZE_M"]
        self.down.ensure_tile(down, batch_size)
        block = self.up.key.block_shape
        if self.up.engine == "vllm" and block and all(block):  # its launcher cuts K tiles to the block of scales
            for entry in (up, down):
                entry["BLOCK_SIZE_K"] = min(int(entry["BLOCK_SIZE_K"]), *block)
        if tma is None:
            device = devices.find(self.up.key.device_name)
            tma = device is None or device.platform in TMA_PLATFORMS
        if not tma:
            up.pop("USE_TMA", None)
            down.pop("USE_TMA", None)
        return up, down


@dataclass(frozen=True)
class Candidate:
    """A file that did not answer but that a person may want: another device or another dtype of the same shape."""

    file: str
    why: str


@dataclass(frozen=True)
class TreeFile:
    """One JSON file of a tree: its directory (`FLAT` for none), name, and the name taken apart."""

    directory: str
    name: str
    parsed: ParsedName | None

    @property
    def path(self) -> str:
        """Relative to the tree's root."""
        return f"{self.directory}/{self.name}" if self.directory else self.name


class ConfigTree:
    """The config files below one folder, listed once.

    Args:
        root: a folder that holds `configs/`, that folder itself, or a flat folder; None is the empty tree (the `none`
            arm), in which every lookup answers `default`.

    Raises:
        UsageError: the folder does not exist or cannot be listed.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else _config_folder(root)
        self.directories: dict[str, dict[str, str]] = {} if self.root is None else _list(self.root)
        self._loaded: dict[str, dict[int, dict[str, Value]]] = {}

    @property
    def flat(self) -> bool:
        """Whether the files lie in the folder itself, without Triton directories."""
        return bool(self.directories) and set(self.directories) == {FLAT}

    def path(self, file: str) -> Path:
        """The absolute path of a file that this tree named."""
        assert self.root is not None
        return self.root / file

    def files(self) -> Iterator[TreeFile]:
        """Every JSON file, by directory and name."""
        for directory in sorted(self.directories):
            for name in sorted(self.directories[directory]):
                yield TreeFile(directory, name, parse_name(name))

    def device_names(self) -> frozenset[str]:
        """The devices that the files' names carry."""
        return frozenset(item.parsed.key.device_name for item in self.files() if item.parsed is not None)

    def load(self, file: str) -> dict[int, dict[str, Value]]:
        """The contents of one file, read once."""
        if file not in self._loaded:
            self._loaded[file] = load_config(self.path(file))
        return self._loaded[file]

    def resolve(self, key: ConfigKey, projection: Projection = "up", *, triton: str) -> Resolution:
        """Look up one projection.

        Args:
            key: the shape, dtype and device (any spelling of its name).
            projection: `up` (gate and up) or `down`.
            triton: the Triton version that will run.

        Raises:
            UsageError: `triton` is no version, or the file that answers is damaged.
        """
        order = [(FLAT, "exact")] if self.flat else search_order(list(self.directories), triton)
        searched: list[str] = []
        if not any(reason == "exact" for _, reason in order):
            own = key.on(devices.normalise(key.device_name))
            searched.append(f"{directory_name(triton)}/{format_name(own, projection)}")
        for directory, reason in order:
            for device, alias in devices.lookup_names(key.device_name):
                for name in self._spellings(key.on(device), projection):
                    file = f"{directory}/{name}" if directory else name
                    searched.append(file)
                    if name not in self.directories[directory]:
                        continue
                    why: Reason = "alias" if alias is not None and reason == "exact" else reason  # type: ignore[assignment]
                    return Resolution(
                        key, projection, file, why, alias.name if alias else None, tuple(searched), self.load(file),
                        root=self.root,
                    )  # fmt: skip
        if projection == "down":
            return self._from_up(key, triton, tuple(searched))
        return Resolution(key, projection, None, "default", None, tuple(searched))

    def resolve_pair(self, key: ConfigKey, *, triton: str) -> Pair:
        """Look up both projections; see `Pair.for_batch` for what they agree on."""
        return Pair(self.resolve(key, "up", triton=triton), self.resolve(key, "down", triton=triton))

    def candidates(self, key: ConfigKey, projection: Projection = "up", limit: int = 8) -> tuple[Candidate, ...]:
        """Files of the same shape for other devices of its vendor or for other dtypes, the device's kin first.

        Where the name does not tell its vendor, those whose name does come last, and say so.
        """
        vendor = devices.vendor_of(key.device_name)
        kin = [devices.normalise(key.device_name), *devices.near(key.device_name, limit=50)]
        found: list[tuple[tuple[bool, bool, int, str], Candidate]] = []
        for item in self.files():
            other = item.parsed
            if other is None or not isinstance(other.key, ConfigKey) or other.projection != projection or other.backend:
                continue
            if (other.key.E, other.key.N) != (key.E, key.N):
                continue
            brand = devices.vendor_of(other.key.device_name)
            if vendor not in (None, brand):
                continue
            same_quant = replace(other.key, device_name=key.device_name) == key
            same_device = other.key.device_name == key.device_name
            if (same_quant and same_device) or not (same_quant or same_device):
                continue
            rank = kin.index(other.key.device_name) if other.key.device_name in kin else len(kin)
            why = (
                f"same shape and dtype on {other.key.device_name}"
                if same_quant
                else "same shape and device, other dtype"
            )
            if brand != vendor:
                why += f" ({brand}'s: {key.device_name} may be another vendor's)"
            found.append(((brand != vendor, not same_quant, rank, item.path), Candidate(item.path, why)))
        return tuple(candidate for _, candidate in sorted(found, key=lambda pair: pair[0])[:limit])

    def _spellings(self, key: ConfigKey, projection: Projection) -> list[str]:
        names = [format_name(key, projection)]
        if key.block_shape and projection == "up" and not key.per_channel_quant:
            names.append(format_name(key, projection, "vllm"))
        return names

    def _from_up(self, key: ConfigKey, triton: str, searched: tuple[str, ...]) -> Resolution:
        up = self.resolve(key, "up", triton=triton)
        searched += up.searched
        if up.reason == "default":
            return replace(up, projection="down", searched=searched)
        without_tma = {size: {n: v for n, v in entry.items() if n != "USE_TMA"} for size, entry in up.configs.items()}
        return replace(up, projection="down", reason="up-config", searched=searched, configs=without_tma)


def _config_folder(root: Path) -> Path:
    inner = root / "configs"
    folder = inner if inner.is_dir() else root
    if not folder.is_dir():
        raise UsageError("is no folder", file=root, fix="name a folder of config files, or `none`")
    return folder


def _list(folder: Path) -> dict[str, dict[str, str]]:
    """Directory name -> file name -> path text; `FLAT` only where there is no Triton directory."""
    directories: dict[str, dict[str, str]] = {}
    flat: dict[str, str] = {}
    try:
        for entry in sorted(os.scandir(folder), key=lambda item: item.name):
            if entry.is_dir():
                if parse_directory(entry.name) is not None:
                    directories[entry.name] = {e.name: e.path for e in os.scandir(entry.path) if _is_json(e)}
            elif _is_json(entry):
                flat[entry.name] = entry.path
    except OSError as error:
        raise UsageError(error.strerror or str(error), file=folder) from None
    return directories or ({FLAT: flat} if flat else {})


def _is_json(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".json") and not entry.name.endswith(".provenance.json") and entry.is_file()
