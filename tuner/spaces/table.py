"""The spaces. Adding a vendor or an op is adding rows here."""

from __future__ import annotations

from tuner.spaces import Axis, Space

__all__ = ["SPACES"]

_MOE = ("group-divides", "warps-have-work", "tile-within-weight")
_TMA = Axis("USE_TMA", (False, True), "variant")

SPACES: tuple[Space, ...] = (
    Space(
        "fused_experts",
        "nvidia",
        (
            Axis("num_stages", (2, 3, 4, 5)),
            Axis("BLOCK_SIZE_M", (16, 32, 64, 128, 256)),
            Axis("BLOCK_SIZE_K", (32, 64, 128, 256)),
            Axis("BLOCK_SIZE_N", (32, 64, 128, 256)),
            Axis("num_warps", (4, 8)),
            Axis("GROUP_SIZE_M", (1, 16, 32, 64), "refine"),
            _TMA,
        ),
        (*_MOE, "k-32-for-groups"),
        "SGLang's and vLLM's grid of 1920, with BLOCK_SIZE_K 32 for groups of 32",
    ),
    Space(
        "fused_experts",
        "amd",
        (
            Axis("num_stages", (1, 2)),
            Axis("BLOCK_SIZE_M", (16, 32, 64, 128, 256)),
            Axis("BLOCK_SIZE_K", (32, 64, 128, 256)),
            Axis("BLOCK_SIZE_N", (16, 32, 64, 128, 256)),
            Axis("num_warps", (1, 2, 4, 8)),
            Axis("GROUP_SIZE_M", (1, 4, 8, 16, 32), "refine"),
            Axis("waves_per_eu", (0, 2, 4), "refine"),
            Axis("matrix_instr_nonkdim", (16, 32), "refine"),
        ),
        _MOE,
        "SGLang's ROCm grid with vLLM's instruction axes refined on the best; descriptors are not pipelined there",
    ),
    Space(
        "fused_experts",
        "intel",
        (
            Axis("num_stages", (2, 3, 4)),
            Axis("BLOCK_SIZE_M", (16, 32, 64, 128, 256)),
            Axis("BLOCK_SIZE_K", (32, 64, 128)),
            Axis("BLOCK_SIZE_N", (32, 64, 128, 256)),
            Axis("num_warps", (4, 8, 16, 32)),
            Axis("GROUP_SIZE_M", (1, 4, 16), "refine"),
            Axis("grf_mode", ("128", "256"), "refine"),
            _TMA,
        ),
        _MOE,
        "tiles up to 32 sub-groups of 16 lanes; grf_mode chooses 128 or 256 registers per thread",
    ),
    Space(
        "fused_experts",
        "cpu",
        (
            Axis("BLOCK_SIZE_M", (16,)),
            Axis("BLOCK_SIZE_N", (32, 64, 128)),
            Axis("BLOCK_SIZE_K", (64, 128)),
            Axis("GROUP_SIZE_M", (1,)),
            Axis("num_warps", (4,)),
            Axis("num_stages", (2,)),
        ),
        ("group-divides", "tile-within-weight"),
        "what the interpreter's time depends on: the number of tiles",
    ),
    *(
        Space(
            "block_fp8_linear",
            vendor,
            (
                Axis("num_stages", stages),
                Axis("BLOCK_SIZE_M", (16, 32, 64, 128)),
                Axis("BLOCK_SIZE_K", (64, 128)),
                Axis("BLOCK_SIZE_N", (32, 64, 128, 256)),
                Axis("num_warps", warps),
                Axis("GROUP_SIZE_M", (1, 8, 32), "refine"),
                *extra,
            ),
            ("group-divides", "warps-have-work", "tile-within-weight"),
            "SGLang's dense grid without the tiles that lost everywhere; its files have no field for descriptors",
        )
        for vendor, stages, warps, extra in (
            ("nvidia", (2, 3, 4, 5), (4, 8), (Axis("SWAP_AB", (False, True)),)),
            ("amd", (1, 2), (2, 4, 8), (Axis("waves_per_eu", (0, 2, 4), "refine"),)),
            ("intel", (2, 3, 4), (4, 8, 16, 32), (Axis("grf_mode", ("128", "256"), "refine"),)),
        )
    ),
    Space(
        "block_fp8_linear",
        "cpu",
        (
            Axis("BLOCK_SIZE_M", (16, 64)),
            Axis("BLOCK_SIZE_N", (64, 128)),
            Axis("BLOCK_SIZE_K", (128,)),
            Axis("GROUP_SIZE_M", (1,)),
            Axis("num_warps", (4,)),
            Axis("num_stages", (2,)),
        ),
        ("group-divides", "tile-within-weight"),
        "what the interpreter's time depends on: the number of tiles",
    ),
    *(
        Space("store_kv_cache", vendor, (Axis("num_split", (1, 2, 4, 8)),), (), "programs that share a row")
        for vendor in ("nvidia", "amd", "intel", "cpu")
    ),
)
