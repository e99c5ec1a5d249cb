"""Whether a server fits its device, asked before anything is allocated: a sentence instead of a traceback."""

from __future__ import annotations

from typing import Any

from moegate.errors import UsageError
from serving.server.spec import DecoderSpec

__all__ = ["cache_bytes", "ensure_fits", "ensure_length", "weight_elements"]

_GIB = 1 << 30


def weight_elements(spec: DecoderSpec, ep: int = 1) -> int:
    """Numbers in all weights that one process holds; with `ep` processes each holds its share of the experts."""
    width, hidden = spec.head_dim, spec.hidden
    attention = hidden * width * (2 * spec.heads + 2 * spec.kv_heads) + 2 * hidden
    experts = -(-spec.experts // ep)
    sparse = 3 * hidden * (experts * spec.expert_width + spec.shared_width) + spec.experts * hidden
    dense = 3 * hidden * spec.intermediate
    moe = len(spec.moe_layers)
    tables = (1 if spec.tied else 2) * spec.vocab * hidden + hidden
    return spec.layers * attention + moe * sparse + (spec.layers - moe) * dense + tables


def cache_bytes(spec: DecoderSpec, slots: int, length: int, item: int) -> int:
    """Bytes of keys and values of `slots` sequences of `length` positions; `item` is the size of one number."""
    return 2 * spec.layers * (1 + slots * length) * spec.kv_heads * spec.head_dim * item


def ensure_length(spec: DecoderSpec, length: int) -> None:
    """Refuse more positions than the model knows: rotary tables and answers beyond them mean nothing."""
    if length > spec.max_positions:
        raise UsageError(f"{length} positions, and the model has {spec.max_positions}", field="length",
                         fix=f"at most {spec.max_positions}")  # fmt: skip


def ensure_fits(spec: DecoderSpec, live: Any, *, slots: int, length: int, item: int, ep: int, share: float) -> None:
    """Refuse what cannot fit: weights and cache against the memory that is free, and against this server's share.

    Args:
        spec: the model.
        live: the device (`xkernels.device`).
        slots: sequences at once.
        length: positions of each.
        item: bytes of one number.
        ep: processes that share the experts.
        share: part of the device's memory that this server may plan with.
    """
    weights, cache = weight_elements(spec, ep) * item, cache_bytes(spec, slots, length, item)
    free, total = live.memory_info()
    if live.kind == "cpu":
        free = total  # pages that hold files count as taken there, and are given up when needed
    limit = min(free, int(total * share))
    if weights + cache <= limit:
        return
    what = f"{share:.0%} of {total / _GIB:.1f}" if total * share < free else f"{free / _GIB:.1f}"
    raise UsageError(
        f"weights of {weights / _GIB:.1f} and a cache of {cache / _GIB:.1f} GiB for {slots} sequences of {length} "
        f"positions do not fit the device's memory: {what} GiB may be taken",
        field="slots",
        fix="fewer --slots or a smaller --length" if weights < limit else "a larger device",
    )
