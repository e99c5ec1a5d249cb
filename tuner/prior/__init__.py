"""The prior: which tiles won elsewhere, ranked for one dtype class and batch size.

`portfolio.json` is a table of counts distilled from published config files (see `tuner.prior.distill`); it holds no
file of anybody's. An architecture can be left out, so that what the prior is worth on a new device can be measured.
`own.json` names tiles that a kernel of ours is written for, which no such file could choose. They come first, whatever
is left out: that such a kernel exists is known on a new device too. Those that suit no other engine's kernel
(`own_tiles`) are no part of the space that all engines share: an entry names a kernel, and up to how many tokens its
tiles are tried.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from moegate import canonical
from moegate.configs import BATCH_SIZES
from moegate.errors import RecordError, UsageError
from tuner.config import Config, Scalar

__all__ = ["OwnTiles", "Prior", "dtype_class", "grid_distance", "load", "own_tiles"]

_Made = TypeVar("_Made")
_FILE = Path(__file__).with_name("portfolio.json")
_OWN = Path(__file__).with_name("own.json")
_REACH = 2
_SCHEMA, _OWN_SCHEMA = 1, 2
# Classes whose winners resemble each other enough to fill up a list that is too short.
_KIN = {"16bit": ("fp8",), "fp8": ("fp8_block", "16bit"), "fp8_block": ("fp8", "16bit"), "int8": ("fp8",)}


def dtype_class(dtype: str | None, block_shape: tuple[int, int] | None = None) -> str:
    """The class under which winners are counted: what decides bytes per element and tiling."""
    if dtype is None or dtype in ("float32", "bfloat16", "float16"):
        return "16bit"
    if dtype.startswith("fp8"):
        return "fp8_block" if block_shape else "fp8"
    return "int8" if dtype.startswith("int8") else dtype


def grid_distance(a: int, b: int) -> int:
    """Steps between two batch sizes on the grid of the 18 usual ones."""

    def place(size: int) -> int:
        return min(range(len(BATCH_SIZES)), key=lambda i: abs(BATCH_SIZES[i] - size))

    return abs(place(a) - place(b))


@dataclass(frozen=True)
class Prior:
    """Counts of winning tiles; `own`: tiles that come before them, by class and batch size.

    `exclude` names architectures (`sm_90`) whose counts are not looked at.
    """

    fields: tuple[str, ...]
    tiles: tuple[tuple[int, ...], ...]
    counts: dict[str, dict[str, dict[int, dict[int, int]]]]
    source: str = ""
    exclude: frozenset[str] = frozenset()
    own: Mapping[str, Mapping[int, tuple[Config, ...]]] = field(default_factory=dict)

    def without(self, *families: str) -> Prior:
        """The same prior as if these architectures had never been tuned. UsageError for one that it does not hold."""
        known = {family for kinds in self.counts.values() for family in kinds}
        if unknown := sorted(set(families) - known):
            raise UsageError(
                f"the prior holds nothing of {unknown[0]!r:.40}",
                field="--without",
                fix=f"one of {', '.join(sorted(filter(None, known)))}",
            )
        return replace(self, exclude=self.exclude | frozenset(families))

    def ranked(
        self, dtype: str | None, block_shape: tuple[int, int] | None, batch_size: int, limit: int
    ) -> list[Config]:
        """The `limit` most frequent tiles within two batch-size steps, our own kernels' before them.

        Args:
            dtype: the dtype field of the config file's name.
            block_shape: (n, k) of block-quantised weights.
            batch_size: rows of hidden states (M).
            limit: most configs to return; fewer where the counts hold fewer.
        """
        kind = dtype_class(dtype, block_shape)
        found: list[int] = []
        for name in (kind, *_KIN.get(kind, ("fp8", "16bit"))):
            votes: Counter[int] = Counter()
            for family, sizes in self.counts.get(name, {}).items():
                if family in self.exclude:
                    continue
                for size, tiles in sizes.items():
                    if grid_distance(size, batch_size) <= _REACH:
                        votes.update(tiles)
            ordered = sorted(votes, key=lambda tile: (-votes[tile], self.tiles[tile]))
            found += [tile for tile in ordered if tile not in found]
            if len(found) >= limit:
                break
        counted = [Config.of(dict(zip(self.fields, self.tiles[tile], strict=True))) for tile in found]
        near = [tiles for size, tiles in self.own.get(kind, {}).items() if grid_distance(size, batch_size) <= _REACH]
        return list(dict.fromkeys([*itertools.chain.from_iterable(near), *counted]))[:limit]


@cache
def load(path: Path = _FILE, own: Path = _OWN) -> Prior:
    """Read both tables. Raises RecordError where one is damaged or of another schema."""
    ours = _read(own, _tiles_by_size, _OWN_SCHEMA)
    return _read(path, lambda data: Prior(
        tuple(data["fields"]), tuple(tuple(tile) for tile in data["tiles"]), _counts(data["counts"]), data["source"],
        own=ours,
    ))  # fmt: skip


@dataclass(frozen=True)
class OwnTiles:
    """Tiles of one kernel of ours beyond the space, which every projection tries up to so many tokens (`up_to`).

    `selected_by`: values that alone select this kernel, whatever else a config holds.
    """

    kernel: str
    up_to: int
    configs: tuple[Config, ...]
    selected_by: Mapping[str, Scalar] = field(default_factory=dict)

    def among(self, recorded: Collection[Config]) -> tuple[Config, ...]:
        """This kernel's of `recorded`: with `selected_by` all that hold its values, listed here or not."""
        if self.selected_by:
            return tuple(
                sorted(c for c in recorded if all(c.get(name) == value for name, value in self.selected_by.items()))
            )
        return tuple(config for config in self.configs if config in recorded)


@cache
def own_tiles(dtype: str | None, block_shape: tuple[int, int] | None, path: Path = _OWN) -> tuple[OwnTiles, ...]:
    """What one dtype class tries beyond the space, in the order of the table. RecordError where it is damaged.

    Args:
        dtype: the dtype field of the config file's name.
        block_shape: (n, k) of block-quantised weights.
        path: the table.
    """
    kind = dtype_class(dtype, block_shape)
    return _read(path, lambda data: tuple(
        OwnTiles(
            entry["kernel"], int(entry["up_to"]),
            tuple(tile.with_(**entry["values"]) for tile in _tiles(data["fields"], entry["tiles"].get(kind, []))),
            entry.get("selected_by", {}),
        )
        for entry in data["beyond"]
    ), _OWN_SCHEMA)  # fmt: skip


def _read(path: Path, make: Callable[[dict[str, Any]], _Made], schema: int = _SCHEMA) -> _Made:
    data = canonical.load_json(path)
    if not isinstance(data, dict) or data.get("schema") != schema:
        raise RecordError(f"is no prior of schema {schema}", file=path)
    try:
        return make(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"is a damaged prior: {type(error).__name__}: {error}", file=path) from error


def _tiles_by_size(data: dict[str, Any]) -> dict[str, dict[int, tuple[Config, ...]]]:
    return {
        kind: {int(size): _tiles(data["fields"], tiles) for size, tiles in sizes.items()}
        for kind, sizes in data["tiles"].items()
    }


def _tiles(fields: list[str], tiles: list[list[int]]) -> tuple[Config, ...]:
    return tuple(Config.of(dict(zip(fields, tile, strict=True))) for tile in tiles)


def _counts(data: dict[str, Any]) -> dict[str, dict[str, dict[int, dict[int, int]]]]:
    return {
        kind: {
            family: {int(size): {int(tile): int(count) for tile, count in rows} for size, rows in sizes.items()}
            for family, sizes in families.items()
        }
        for kind, families in data.items()
    }
