"""Development tool: distil a tree of tuned config files into `portfolio.json`.

    python -m tuner.prior.distill CONFIGS_FOLDER "where the files come from" > tuner/prior/portfolio.json

Only counts are kept: how often each tile (BLOCK_SIZE_M, N, K, num_warps, num_stages) won, by dtype class, architecture
and batch size. Files that repeat another file of the same architecture word for word count once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

from moegate import canonical, devices
from moegate.configs import BATCH_SIZES, ConfigKey, ConfigTree
from tuner.config import TILE_FIELDS
from tuner.prior import dtype_class

__all__ = ["distill", "family_of"]

Tile = tuple[int, ...]


def family_of(device_name: str) -> str:
    """The architecture of a device name (`sm_90`), or the name itself where no table knows it."""
    device = devices.find(device_name)
    if device is None:
        device = next((d for d in devices.DEVICES if any(a.name == device_name for a in d.aliases)), None)
    return device.target if device is not None else device_name


def distill(folder: Path, source: str) -> dict[str, object]:
    """Count the winners of every readable file below `folder`; see the module."""
    tree = ConfigTree(folder)
    seen: set[tuple[str, str, str]] = set()
    counts: dict[str, dict[str, dict[int, Counter[Tile]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(Counter))
    )
    files = 0
    for item in tree.files():
        if item.parsed is None or not isinstance(item.parsed.key, ConfigKey):
            continue
        key = item.parsed.key
        kind, family = dtype_class(key.dtype, key.block_shape), family_of(key.device_name)
        entries = tree.load(item.path)
        mark = (
            kind,
            family,
            canonical.digest(sorted((size, sorted(entry.items())) for size, entry in entries.items())),
        )
        if mark in seen:
            continue
        seen.add(mark)
        files += 1
        for size, entry in entries.items():
            if size in BATCH_SIZES and all(name in entry for name in TILE_FIELDS):
                counts[kind][family][size][tuple(int(entry[name]) for name in TILE_FIELDS)] += 1
    tiles = sorted({tile for f in counts.values() for s in f.values() for c in s.values() for tile in c})
    index = {tile: number for number, tile in enumerate(tiles)}
    table = {
        kind: {
            family: {str(size): sorted([index[t], n] for t, n in sizes[size].items()) for size in sorted(sizes)}
            for family, sizes in sorted(families.items())
        }
        for kind, families in sorted(counts.items())
    }
    return {"schema": 1, "source": source, "files": files, "fields": list(TILE_FIELDS), "tiles": tiles, "counts": table}


def main() -> None:
    """Print the distilled table."""
    folder, source = Path(sys.argv[1]), sys.argv[2]
    text = json.dumps(distill(folder, source), separators=(",", ":"))
    # One line per architecture keeps a change readable.
    print(text.replace('},"', '},\n"').replace('"tiles":', '\n"tiles":').replace('"counts":', '\n"counts":'))


if __name__ == "__main__":
    main()
