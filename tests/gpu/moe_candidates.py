"""The candidates of `bench_moe`: what won, for either kernel, in earlier sweeps of many times as many configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xkernels.ops._details import large_experts as large
from xkernels.ops._details import stream_experts as stream

TOKENS = (1, 16, 64, 128, 512, 1024, 4096)
# By the most tokens that they are for, the same for both kernels: BLOCK_SIZE_M, _N, _K, warps, stages.
CANDIDATES: dict[str, dict[int, list[tuple[int, ...]]]] = {
    "bf16": {
        1: [(16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 64, 128, 4, 6), (16, 128, 128, 4, 5), (16, 32, 256, 4, 3),
            (16, 32, 128, 4, 4), (16, 64, 256, 4, 3), (16, 64, 64, 4, 5), (16, 64, 128, 4, 10), (16, 128, 128, 4, 6)],
        128: [(16, 128, 128, 4, 3), (16, 64, 128, 4, 3), (16, 64, 64, 4, 4), (16, 128, 128, 8, 2), (16, 128, 128, 8, 3),
              (16, 128, 64, 4, 4), (16, 64, 256, 4, 3), (16, 64, 128, 4, 2), (16, 128, 128, 4, 2),
              (16, 64, 128, 4, 10), (16, 128, 128, 4, 6)],
        512: [(64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3), (64, 128, 128, 4, 3),
              (64, 128, 128, 8, 4), (64, 128, 128, 4, 4), (128, 256, 64, 8, 4)],
        4096: [(128, 256, 64, 8, 4), (128, 256, 32, 8, 8), (128, 256, 64, 8, 3), (128, 128, 64, 8, 3),
               (128, 128, 64, 8, 6), (128, 128, 128, 8, 3)],
    },
    "fp8": {
        1: [(16, 64, 128, 4, 4), (16, 128, 128, 4, 5), (16, 64, 128, 4, 6), (16, 128, 128, 4, 3), (16, 64, 128, 4, 5),
            (16, 128, 128, 4, 8)],
        128: [(16, 128, 128, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 256, 128, 8, 3),
              (16, 128, 128, 4, 4), (16, 128, 128, 4, 2), (16, 128, 128, 4, 8), (16, 128, 128, 4, 12)],
        4096: [(64, 128, 128, 4, 4), (64, 128, 128, 4, 3), (64, 64, 128, 4, 4), (128, 256, 128, 8, 4)],
    },
}  # fmt: skip
# Blocks of one row, for a few tokens: BLOCK_SIZE_N, _K, warps, stages. Without descriptors, for either kernel.
FEW_TOKENS = 4
SINGLE_ROWS: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "bf16": {
        "up": [(16, 256, 4, 3), (16, 256, 4, 4), (16, 256, 4, 5), (32, 256, 4, 3), (32, 256, 4, 4), (16, 512, 4, 3),
               (32, 512, 4, 3), (64, 256, 4, 3)],
        "down": [(16, 128, 2, 8), (16, 128, 4, 8), (32, 128, 4, 8), (32, 128, 8, 8), (16, 256, 4, 4), (32, 256, 8, 4),
                 (16, 256, 4, 2), (32, 256, 4, 1)],
    },
    "fp8": {
        "up": [(32, 128, 4, 3), (32, 128, 4, 4), (64, 128, 4, 3), (16, 256, 4, 3), (32, 256, 4, 3)],
        "down": [(32, 128, 4, 4), (32, 128, 8, 4), (64, 128, 8, 4), (32, 64, 4, 8), (64, 64, 8, 8)],
    },
}  # fmt: skip
# GROUP_SIZE_M of the candidates, by the most tokens.
GROUPS = {128: (1,), 4096: (1, 16)}


def tiled(mode: str, m: int) -> list[dict[str, Any]]:
    """Candidates of one batch size, for tiles of the matrix unit."""
    chosen, groups = (table[min(limit for limit in table if m <= limit)] for table in (CANDIDATES[mode], GROUPS))
    return [
        {"BLOCK_SIZE_M": c[0], "BLOCK_SIZE_N": c[1], "BLOCK_SIZE_K": c[2], "GROUP_SIZE_M": group, "num_warps": c[3],
         "num_stages": c[4], "USE_TMA": True}
        for c in chosen
        for group in groups
    ]  # fmt: skip


def shared(mode: str, m: int) -> list[dict[str, Any]]:
    """The candidates as both kernels can run them; at a few tokens also those with blocks of one row."""
    single = single_rows(mode, "up") + single_rows(mode, "down") if m <= FEW_TOKENS else []
    return tiled(mode, m) + single


def for_many(config: dict[str, Any]) -> bool:
    """Whether our kernel for many rows takes a candidate."""
    return (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]) == (large.BLOCK_M, large.BLOCK_N)


def streamed(mode: str, config: dict[str, Any]) -> bool:
    """Whether our kernel that streams weights takes a candidate."""
    return stream.other_config("fp8_block" if mode == "fp8" else "none", config) is None


def few(config: dict[str, Any]) -> bool:
    """Whether a candidate's block is one of few rows, as the launcher sees it."""
    return config["BLOCK_SIZE_M"] <= 32


# The other choice of a rule of our launcher, and the candidates that are tried with it too: config, tokens, FP8, down.
OTHERS: tuple[tuple[dict[str, Any], Callable[[dict[str, Any], int, bool, bool], bool]], ...] = (
    ({"INLINE": False}, lambda c, m, fp8, down: fp8 and few(c) and down),
    ({"QUANT_OUT": True}, lambda c, m, fp8, down: fp8 and few(c) and not down and m > 1),
    ({"PROGRAMS": 3}, lambda c, m, fp8, down: fp8 and few(c) and down and m > 1 and c["BLOCK_SIZE_N"] == 128),
    ({"PROGRAMS": 0}, lambda c, m, fp8, down: not few(c) and (down or not fp8) and not for_many(c)),
    ({"PDL": False}, lambda c, m, fp8, down: not few(c) and m > 512 and (not fp8 or for_many(c))),
)


def variants(mode: str, m: int, part: str) -> list[dict[str, Any]]:
    """The candidates as our kernel can run them: with a rule of its launcher and with that rule's other choice.

    At a few tokens also those with blocks of one row.
    """
    out = single_rows(mode, part) if m <= FEW_TOKENS else []
    for config in tiled(mode, m):
        others = [] if streamed(mode, config) else OTHERS
        out += [config, *({**config, **other} for other, at in others if at(config, m, mode == "fp8", part == "down"))]
    return out


def single_rows(mode: str, part: str) -> list[dict[str, Any]]:
    """Candidates with BLOCK_SIZE_M 1 of one projection."""
    names = ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
    found = [dict(zip(names, c, strict=True)) for c in SINGLE_ROWS[mode][part]]
    return [{"BLOCK_SIZE_M": 1, "GROUP_SIZE_M": 1, **config} for config in found]
