"""What the values of a projection's config may be: looked at once for each config, not with every launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from moegate.configs.values import FIELDS, TILE, Field

# As files are checked, and how many programs a launch gets, which no file says.
_FIELDS = (*FIELDS, Field("PROGRAMS", "int", 0, 1 << 20))


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
    for field in _FIELDS:
        if field.name not in config:
            if field.name in TILE:  # the kernels have defaults for the others
                return f"{field.name} is missing"
        elif said := field.problem(config[field.name]):
            return f"{field.name} {said}"
    return ""
