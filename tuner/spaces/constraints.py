"""What a config must satisfy before anything is compiled: a table of rules about the op, not about the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.config import Config
from tuner.problem import Problem

__all__ = ["CONSTRAINTS", "REFINED_WHEN", "Constraint"]


@dataclass(frozen=True)
class Constraint:
    """One rule with the reason for it."""

    name: str
    holds: Callable[[Config, Problem], bool]
    why: str


def _group_divides(config: Config, problem: Problem) -> bool:
    if problem.block_shape is None:
        return True
    return problem.block_shape[1] % config.integer("BLOCK_SIZE_K", 1) == 0


def _warps_have_work(config: Config, problem: Problem) -> bool:
    del problem
    elements = config.integer("BLOCK_SIZE_M", 1) * config.integer("BLOCK_SIZE_N", 1)
    return elements >= config.integer("num_warps", 1) * 32


def _tile_within_weight(config: Config, problem: Problem) -> bool:
    # A tile wider than the whole weight only multiplies padding; the next power of two still covers it in one step.
    widest = max(problem.N * 2, problem.H, 16)
    return config.integer("BLOCK_SIZE_N", 1) < 2 * widest and config.integer("BLOCK_SIZE_K", 1) < 2 * widest


def _k_32_for_groups(config: Config, problem: Problem) -> bool:
    if config.integer("BLOCK_SIZE_K", 64) != 32:
        return True
    return problem.block_shape is not None and problem.block_shape[1] == 32


CONSTRAINTS: dict[str, Constraint] = {
    rule.name: rule
    for rule in (
        Constraint(
            "group-divides", _group_divides, "one scale covers block_k columns: a wider step would apply it twice"
        ),
        Constraint(
            "warps-have-work", _warps_have_work, "a tile with less than one element per thread wastes its warps"
        ),
        Constraint("k-32-for-groups", _k_32_for_groups, "K steps of 32 serve groups of 32 and nothing else"),
        Constraint("tile-within-weight", _tile_within_weight, "a tile wider than the weight multiplies only padding"),
    )
}


def _rows_share_weights(config: Config, problem: Problem, size: int) -> bool:
    return size * problem.topk > problem.E * config.block_m


REFINED_WHEN: dict[str, Callable[[Config, Problem, int], bool]] = {"GROUP_SIZE_M": _rows_share_weights}
"""When a refined axis can matter: GROUP_SIZE_M lets blocks of rows share an expert's weights, where it has several."""
