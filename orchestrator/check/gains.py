"""What tuning was worth where it was measured: read from the timings in provenance sidecars."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moegate.configs import ConfigKey, parse_name
from moegate.configs.values import is_batch_size
from moegate.errors import UsageError
from moegate.records import Provenance, read
from moegate.records.provenance import SUFFIX, config_name


@dataclass(frozen=True)
class Gain:
    """Time with the default config over time with the tuned one: geometric mean over batch sizes, and the largest."""

    key: ConfigKey
    geomean: float
    best: float
    best_batch: int


def read_gains(folders: Iterable[Path]) -> tuple[Gain, ...]:
    """The gains of every readable sidecar with timings at or below `folders`. Interpreter timings are left out."""
    gains: list[Gain] = []
    for folder in folders:
        for path in sorted(folder.rglob(f"*{SUFFIX}")):
            gain = _gain(path)
            if gain is not None:
                gains.append(gain)
    return tuple(gains)


def _gain(path: Path) -> Gain | None:
    parsed = parse_name(config_name(path.name))
    if parsed is None or not isinstance(parsed.key, ConfigKey):
        return None
    try:
        record = read(Provenance, path)
    except UsageError:
        return None
    ratios = {
        int(size): timing.default_us / timing.winner_us
        for size, timing in record.timings.items()
        if is_batch_size(size) and timing.winner_us > 0 and timing.default_us > 0
    }
    if not ratios or record.interpreter:
        return None
    best = max(ratios, key=lambda size: ratios[size])
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return Gain(parsed.key, mean, ratios[best], best)


def expected(gains: tuple[Gain, ...], key: ConfigKey) -> tuple[float | None, str]:
    """What tuning `key` is expected to be worth, and from what that follows; (None, why) where nothing is stored.

    The nearest evidence counts: this key, then this shape on any device, then this device, then everything stored.
    """
    tiers = (
        ("measured for this key", [g for g in gains if g.key == key]),
        ("measured for this shape elsewhere", [g for g in gains if (g.key.E, g.key.N) == (key.E, key.N)]),
        ("measured on this device", [g for g in gains if g.key.device_name == key.device_name]),
        ("measured elsewhere", list(gains)),
    )
    for why, found in tiers:
        if found:
            return sorted(g.geomean for g in found)[len(found) // 2], f"{why} ({len(found)} files)"
    return None, "nothing measured is stored"
