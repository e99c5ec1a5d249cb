"""One kernel configuration as a value: hashable, ordered as files order it, with one spelling for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FIELD_ORDER", "TILE_FIELDS", "Config", "Scalar"]

Scalar = int | bool | str

# The order in which the engines write their files; unknown fields follow, by name.
FIELD_ORDER = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "num_warps",
    "num_stages",
    "waves_per_eu",
    "matrix_instr_nonkdim",
    "kpack",
    "grf_mode",
    "USE_TMA",
)
TILE_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
_RANK = {name: rank for rank, name in enumerate(FIELD_ORDER)}


@dataclass(frozen=True, order=True)
class Config:
    """A kernel's parameters. Build with `Config.of`, which fixes the order, so that equal parameters are equal."""

    items: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """A config from a mapping such as one entry of a config file."""
        return cls(tuple(sorted(values.items(), key=lambda item: (_RANK.get(item[0], len(_RANK)), item[0]))))

    def __getitem__(self, name: str) -> Scalar:
        for key, value in self.items:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: Scalar | None = None) -> Scalar | None:
        """The value of one parameter, or `default`."""
        return next((value for key, value in self.items if key == name), default)

    def integer(self, name: str, default: int = 0) -> int:
        """A numeric parameter as int."""
        value = self.get(name, default)
        return int(value) if value is not None else default

    def with_(self, **changes: Scalar) -> Config:
        """The same config with some parameters changed or added."""
        return Config.of({**dict(self.items), **changes})

    def without(self, *names: str) -> Config:
        """The same config without some parameters."""
        return Config(tuple((key, value) for key, value in self.items if key not in names))

    def as_dict(self) -> dict[str, Scalar]:
        """A plain dict, in file order."""
        return dict(self.items)

    @property
    def block_m(self) -> int:
        """BLOCK_SIZE_M (0 where the op has none)."""
        return self.integer("BLOCK_SIZE_M")

    @property
    def tma(self) -> bool:
        """Whether the weights are loaded through descriptors."""
        return bool(self.get("USE_TMA", False))

    def spell(self) -> str:
        """`16x64x128 g1 w4 s3 tma`: short and unique within one op."""
        tile = "x".join(str(self[name]) for name in TILE_FIELDS[:3] if self.get(name) is not None)
        parts = [tile] if tile else []
        short = {"GROUP_SIZE_M": "g", "num_warps": "w", "num_stages": "s"}
        for name, value in self.items:
            if name in TILE_FIELDS[:3]:
                continue
            if name == "USE_TMA":
                parts += ["tma"] if value else []
            else:
                parts.append(f"{short.get(name, name + '=')}{value}")
        return " ".join(parts)
