"""What `bench_large` compares: variants for many rows, experiments on few; and the table that it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKENS = (4096, 1024, 8192, 2048)  # the ones that decide come first
SHAPES = ("E64", "E128")
PARTS = ("up", "down", "chain", "layer")
LIMIT = {"bf16": 0.01, "fp8": 0.03}  # relative error against the float32 twin
TARGET_FLOOR, TARGET_RATIO = 0.65, 1.25  # of the floor, over SGLang's: what is asked of the up projection at 4096

_TILE = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "GROUP_SIZE_M": 16, "num_warps": 8, "num_stages": 4,
         "USE_TMA": True, "LARGE": True}  # fmt: skip
_STEP = {"bf16": {"BLOCK_SIZE_K": 64}, "fp8": {"BLOCK_SIZE_K": 128}}
_SMALL = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "num_warps": 4,
          "num_stages": 4, "USE_TMA": True}  # fmt: skip

# Fields over the tile above, most ambitious first. Checked are all of them; of those that agree with the twin the first
# MOST are timed, so where the full kernel fails or hangs, what it fails without moves up: the counter, the stages, the
# gathering loader.
_LARGE: dict[str, dict[str, Any]] = {
    "ws": {},
    "ws lead pdl": {"LEAD": 1, "PDL": True},
    "ws static": {"DYNAMIC": False},
    "ws sorted": {"GATHER": False},  # rows copied into order first: no gathering loader
    "ws group 8": {"GROUP_SIZE_M": 8},
}
# Without warp specialisation: block FP8's two weight tiles of a group at once. For bf16 that is the present kernel.
_WIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wide 2 stages": ({**_SMALL, "num_stages": 2, "WIDE": True}, _SMALL),
    "wide 3 stages": ({**_SMALL, "num_stages": 3, "WIDE": True}, _SMALL),
}
MOST = {"bf16": 5, "fp8": 7}
FIRST_WIDE = 2  # so many of FP8's timed variants are wide ones

# The up projection of a few rows in block FP8 takes a constant 7 us more than its bytes: about as long as the kernel
# that quantises its input, a start and a last wave. Each line takes one of them away.
FEW: dict[str, dict[str, Any]] = {
    "base": {},
    "lines 2": {"LINES": 2},  # weights asked for while the input is quantised
    "lines 4": {"LINES": 4},
    "lines 8": {"LINES": 8},
    "inline": {"INLINE": True},  # no quantising kernel at all
    "walk 4": {"PROGRAMS": 4},  # persistent: the next tile's loads are under way while one ends
    "walk 4 lines 4": {"PROGRAMS": 4, "LINES": 4},
    "n64 lines 4": {"BLOCK_SIZE_N": 64, "LINES": 4},  # twice the tiles: a shorter last wave
    "6 stages lines 4": {"num_stages": 6, "LINES": 4},
}
FEW_TOKENS = (64, 16, 128)


def variants(mode: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> up and down config of every variant of a mode, most ambitious first."""
    full = {name: (c, c) for name, extra in _LARGE.items() for c in [{**_TILE, **_STEP[mode], **extra}]}
    if mode == "fp8":
        full["ws lead pdl"] = (*[{**full["ws lead pdl"][0], "LEAD": 2}] * 2,)
        full |= _WIDE
    return full


def timed(mode: str, right: list[str]) -> list[str]:
    """Which of the variants that are right get timed."""
    large, wide = ([n for n in right if n in group] for group in (_LARGE, _WIDE))
    room = MOST[mode] - min(len(wide), FIRST_WIDE if large else len(wide))
    return (large[:room] + wide)[: MOST[mode]]


def recorded(mode: str, shape: str, m: int, kernel: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pair of configs in docs/results of a kernel (`ours`, `sglang`) at the nearest batch size."""
    rows = json.loads((ROOT / f"docs/results/h200_moe_{mode}.json").read_text())["shapes"][shape]["rows"]
    row = min(rows, key=lambda r: (abs(math.log(r["m"] / m)), -r["m"]))[kernel]
    return row["up"], row["down"]


def short_text(row: dict[str, Any]) -> list[str]:
    """One batch size in short: up projections and whole chains of all kernels, a line each."""
    out = []
    for part in ("up", "chain"):
        base = row["us"].get("sglang", {}).get(part)
        text = f"{row['mode']:4s} {row['shape']:4s} M={row['m']:<4d} {part:5s}"
        for name, us in row["us"].items():
            if part in us:
                share = f" {row['floor'][part] / us[part]:.2f}" if part in row["floor"] else ""
                text += f" | {name} {us[part]:.1f}{share}" + (f" x{base / us[part]:.2f}" if base else "")
        out.append(text)
    return out


def row_text(row: dict[str, Any]) -> list[str]:
    """Lines of the table for one batch size: a line per kernel; microseconds, share of the floor, over SGLang's."""
    floor, base = row["floor"], row["us"].get("sglang", {})
    out = []
    for name, us in row["us"].items():
        text = f"{row['mode']:4s} {row['shape']:4s} M={row['m']:5d} {name:14s}"
        for part in PARTS:
            if part not in us:
                text += f" | {part} -"
                continue
            share = f" {floor[part] / us[part]:.2f}" if part in floor else ""
            ratio = f" x{base[part] / us[part]:.2f}" if part in base else ""
            text += f" | {part} {us[part]:7.1f}{share}{ratio}"
        out.append(text)
    return out


def verdicts(lines: list[dict[str, Any]]) -> list[str]:
    """The point of the issue, and where each variant would serve: by shape and mode."""
    out, rows = [], [line for line in lines if line.get("stage") == "times"]
    for line in rows:
        ups = {n: us["up"] for n, us in line["us"].items() if n != "sglang" and "up" in us}
        if line["m"] != 4096 or not ups:
            continue
        name = min(ups, key=lambda n: ups[n])
        share, ratio = line["floor"]["up"] / ups[name], line["us"].get("sglang", {}).get("up", 0.0) / ups[name]
        met = share >= TARGET_FLOOR or ratio >= TARGET_RATIO
        out.append(f"UP AT 4096 {line['mode']:4s} {line['shape']:4s}: {name}: {share:.2f} of the floor, x{ratio:.2f} "
                   f"of SGLang's -> {'MET' if met else 'not met'}")  # fmt: skip
    wins: dict[tuple[str, str], list[str]] = {}
    for line in rows:
        chains = {n: us["chain"] for n, us in line["us"].items() if "chain" in us}
        if chains:
            best = min(chains, key=lambda n: chains[n])
            wins.setdefault((line["mode"], line["shape"]), []).append(f"{line['m']}: {best}")
    out += [f"FASTEST CHAIN {m} {s}: " + ", ".join(sorted(w, key=lambda t: int(t.split(":")[0])))
            for (m, s), w in wins.items()]  # fmt: skip
    few: dict[str, list[float]] = {}
    for line in lines:
        if line.get("stage") == "few":
            for name, us in line["us"].items():
                few.setdefault(name, []).append(line["floor"] / us["up"])
    whole = {n: math.prod(f) ** (1 / len(f)) for n, f in few.items() if len(f) == max(map(len, few.values()))}
    if whole:
        best = max(whole, key=lambda n: whole[n])
        out.append(f"FP8 FEW ROWS E64, up, geometric mean of the floor: base {whole.get('base', 0):.3f}, best {best} "
                   f"{whole[best]:.3f}, its worst {min(few[best]):.3f} (asked: 0.90 at each)")  # fmt: skip
    return out
