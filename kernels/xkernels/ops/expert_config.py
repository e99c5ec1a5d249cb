"""What the values of a projection's config may be: looked at once for each config, not with every launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class _Field:
    """An integer of a config: the least that kernels take, whether it is a power of two, and what is taken below."""

    least: int
    power_of_two: bool = False
    also: tuple[int, ...] = ()
    needed: bool = False

    def takes(self, value: object) -> bool:
        if type(value) is not int:  # a bool is no size
            return False
        fits = value >= self.least and not (self.power_of_two and value & (value - 1))
        return fits or value in self.also

    @property
    def wanted(self) -> str:
        words = f"{'a power of two' if self.power_of_two else 'an integer'} of at least {self.least}"
        return " or ".join([*map(str, self.also), words])


# As `moegate.configs` takes them from files: a matrix unit multiplies tiles of at least 16 in each dimension, and
# blocks of one row are for the kernels of single rows.
_FIELDS = {
    "BLOCK_SIZE_M": _Field(16, power_of_two=True, also=(1,), needed=True),
    "BLOCK_SIZE_N": _Field(16, power_of_two=True, needed=True),
    "BLOCK_SIZE_K": _Field(16, power_of_two=True, needed=True),
    "GROUP_SIZE_M": _Field(1),
    "num_warps": _Field(1, power_of_two=True),
    "num_stages": _Field(1),
    "PROGRAMS": _Field(0),
}


def check_config(projection: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError naming `projection` and the first value of its config that no kernel takes."""
    items = tuple(config.items())
    try:
        wrong = _wrong(items)
    except TypeError:  # a list is no key of a cache
        wrong = _wrong.__wrapped__(items)
    if wrong:
        raise ValueError(f"config of the {projection} projection: {wrong}")


@lru_cache(maxsize=1024)
def _wrong(items: tuple[tuple[str, Any], ...]) -> str:
    """What is wrong with a config's items; empty where nothing is."""
    config = dict(items)
    for name, field in _FIELDS.items():
        if name not in config:
            if field.needed:
                return f"{name} is missing"
        elif not field.takes(config[name]):
            return f"{name} must be {field.wanted}, not {config[name]!r}"
    return ""
