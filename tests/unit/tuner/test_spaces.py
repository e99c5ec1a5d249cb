"""The spaces of configs: sizes, moves, refinements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegate.errors import UsageError
from tuner.config import Config
from tuner.problem import Problem
from tuner.spaces import space_for
from tuner.spaces.constraints import CONSTRAINTS
from tuner.spaces.table import SPACES

BF16 = Problem("fused_experts", 64, 896, 1280, 6, "bfloat16")
FP8 = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (128, 128))
GROUPS_OF_32 = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (32, 32))


def test_nvidia_space_has_the_known_sizes() -> None:
    space = space_for("fused_experts", "nvidia")
    assert len(space.configs(BF16)) == 480
    assert len(space.configs(FP8)) == 320
    assert {config["BLOCK_SIZE_K"] for config in space.configs(GROUPS_OF_32)} == {32}


def test_amd_and_intel_have_axes_of_their_own() -> None:
    amd, intel = space_for("fused_experts", "amd"), space_for("fused_experts", "intel")
    assert amd.axis("waves_per_eu") is not None
    assert not amd.has_tma
    assert intel.axis("grf_mode") is not None
    assert intel.has_tma


def test_every_space_names_known_constraints_and_yields_configs() -> None:
    for space in SPACES:
        assert set(space.constraints) <= set(CONSTRAINTS)
        configs = space.configs(BF16)
        assert configs
        assert len(set(configs)) == len(configs)


def test_unknown_space_names_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"known: amd, cpu, intel, nvidia"):
        space_for("fused_experts", "abacus")


@given(st.integers(0, 479))
def test_moves_stay_in_the_space_and_near(place: int) -> None:
    space = space_for("fused_experts", "nvidia")
    configs = space.configs(BF16)
    config = configs[place]
    known = set(configs)
    moves = list(space.moves(config, BF16))
    assert len(set(moves)) == len(moves)
    for moved in moves:
        assert moved in known
        changed = {name for name, value in moved.items if config[name] != value}
        assert len(changed) <= 2
        assert len(changed) == 1 or any(name.startswith("BLOCK_") for name in changed)
    for moved in space.moves(config, BF16, launch_only=True):
        assert moved in known
        assert all(moved[f"BLOCK_SIZE_{axis}"] == config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")


@given(st.integers(0, 479))
def test_a_reshaped_tile_is_twice_or_half_as_wide_or_deep(place: int) -> None:
    space = space_for("fused_experts", "nvidia")
    configs = space.configs(BF16)
    config, known = configs[place], set(configs)
    found = list(space.reshaped(config, BF16))
    assert len(set(found)) == len(found) <= 8
    for other in found:
        assert other in known
        changed = {name: other.integer(name) / config.integer(name) for name, v in other.items if config[name] != v}
        longer = [changed.pop(name) for name in ("BLOCK_SIZE_N", "BLOCK_SIZE_K") if name in changed]
        assert longer in ([2.0], [0.5])
        stages = other.integer("num_stages") - config.integer("num_stages")
        assert stages in (0, -1 if longer == [2.0] else 1)
        assert set(changed) <= {"num_stages"}


def test_complete_fills_and_refuses() -> None:
    space = space_for("fused_experts", "nvidia")
    tile = Config.of({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "num_warps": 4, "num_stages": 3})
    full = space.complete(tile)
    assert full is not None
    assert full["GROUP_SIZE_M"] == 1
    assert space.complete(tile.with_(num_stages=7)) is None
    assert space.complete(tile.with_(USE_TMA=True)) == full.with_(USE_TMA=True)


def test_refinements_visit_every_value_but_its_own_where_rows_share_weights() -> None:
    space = space_for("fused_experts", "nvidia")
    config = space.configs(BF16)[0]
    assert [other["GROUP_SIZE_M"] for other in space.refinements(config, BF16, 4096)] == [16, 32, 64]
    assert list(space.refinements(config, BF16, 1)) == []
    assert len(list(space.refinements(config, BF16, 1, everywhere=True))) == 3


def test_config_is_the_same_whatever_the_order_it_was_written_in() -> None:
    a = Config.of({"num_warps": 4, "BLOCK_SIZE_M": 16})
    b = Config.of({"BLOCK_SIZE_M": 16, "num_warps": 4})
    assert a == b
    assert hash(a) == hash(b)
    assert list(a.as_dict()) == ["BLOCK_SIZE_M", "num_warps"]


def test_spelling_is_unique_over_a_space() -> None:
    space = space_for("fused_experts", "intel")
    configs = [other for c in space.configs(BF16)[:50] for other in (c, *space.refinements(c, BF16, 1))]
    spelled = [config.spell() for config in configs]
    assert len(set(spelled)) == len(spelled)
