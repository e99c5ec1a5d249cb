"""What lies between the big operators of a decoder: norms with their residuals, rotary positions, gates, the cache.

Two rows, chosen by the dispatch table as any operator: plain torch (the twin, and what a CPU runs), and fused kernels
that read and write each tensor once. A few rows a step have kernels of their own (`few_rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from serving.server.kvcache import KvCache
from xkernels.ops.activation import silu_and_mul
from xkernels.ops.attention import decode_attention
from xkernels.ops.decoder import add_rms_norm, rotate, rotate_and_store
from xkernels.ops.kv_cache import store_kv_cache

__all__ = ["Glue", "Steps", "TorchGlue", "TritonGlue"]


class Steps:
    """Where the rows of one decode step stand; computed once a step and used by every layer.

    Args:
        cache: keys and values.
        positions: int64 [B]; -1 marks a padded row.
        slots: int64 [B].
        length: positions that are attended to.
    """

    def __init__(self, cache: KvCache, positions: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        padded = positions < 0
        steps = torch.arange(length, device=positions.device)
        self.slots, self.length = slots, length
        self.positions = positions.clamp_min(0)
        self.first = 1 + slots * cache.length
        self.rows = torch.where(padded, 0, self.first + positions)
        self._steps = steps
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def visible(self) -> torch.Tensor:
        """Which positions each row attends to, bool [B, length]."""
        return self._steps[None, :] <= self.positions[:, None]

    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows of every position, int32 [B, length], and how many of them count, int32 [B]."""
        if self._table is None:
            rows = (self.first[:, None] + self._steps[None, :]).to(torch.int32)
            self._table = rows, (self.positions + 1).to(torch.int32)
        return self._table


class Glue(Protocol):
    """The operations between the big ones."""

    functions: Mapping[str, Callable[..., Any]]
    """Operator -> the function that does it."""

    def add_norm(
        self, x: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` [T, H] plus up to two `deltas`, and its RMS norm times `weight`: (sum, normed)."""

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions on `qk` [T, heads, D] (any strides over T); `cos` and `sin` [T, D]."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for `gate_up` [T, 2I], gate columns first: [T, I]."""

    def store(self, cache: KvCache, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Write keys and values [T, kv_heads, D] to the cache's `rows` int64 [T]; row 0 takes what nobody reads."""

    def place(
        self, cache: KvCache, layer: int, qk: torch.Tensor, v: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """`rotate` `qk` [T, heads + kv_heads, D] by `turn` (cos, sin), and `store` its keys: queries [T, heads, D]."""

    def attend(self, cache: KvCache, layer: int, q: torch.Tensor, kv_heads: int, steps: Steps) -> torch.Tensor:
        """Attention of one new token per sequence, `q` [B, heads, D] -> [B, heads, D]."""


class TorchGlue:
    """Plain torch."""

    functions: Mapping[str, Callable[..., Any]] = {
        "decode_attention": F.scaled_dot_product_attention, "store_kv_cache": torch.Tensor.index_copy_,
        "add_rms_norm": F.rms_norm, "silu_and_mul": F.silu,
    }  # fmt: skip

    def add_norm(
        self, x: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum, then norm."""
        for delta in deltas:
            x = x + delta
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Pairs are (i, i + D/2)."""
        first, second = qk.chunk(2, dim=-1)
        return qk * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Two operations."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store(self, cache: KvCache, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """One indexed copy each."""
        cache.keys[layer].index_copy_(0, rows, k.reshape(-1, cache.width))
        cache.values[layer].index_copy_(0, rows, v.reshape(-1, cache.width))

    def place(
        self, cache: KvCache, layer: int, qk: torch.Tensor, v: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """One after the other."""
        heads = qk.shape[1] - v.shape[1]
        turned = self.rotate(qk, *turn)
        self.store(cache, layer, turned[:, heads:], v, rows)
        return turned[:, :heads]

    def attend(self, cache: KvCache, layer: int, q: torch.Tensor, kv_heads: int, steps: Steps) -> torch.Tensor:
        """Gather the slots, then torch's attention under a mask."""
        pair = cache.gather(layer, steps.slots, steps.length)
        keys, values = (x.view(*x.shape[:2], kv_heads, -1).transpose(1, 2) for x in pair)
        mask = steps.visible[:, None, None]
        return attention(q[:, :, None], keys, values, mask=mask)[:, :, 0]


class TritonGlue:
    """Fused kernels; the cache and its attention are `xkernels` operators."""

    functions: Mapping[str, Callable[..., Any]] = {
        "decode_attention": decode_attention, "store_kv_cache": store_kv_cache, "add_rms_norm": add_rms_norm,
        "rotary": rotate_and_store, "silu_and_mul": silu_and_mul,
    }  # fmt: skip

    def add_norm(
        self, x: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`xkernels.ops.decoder`: one program per row."""
        # Two deltas come from two streams that have just joined.
        return add_rms_norm(x, deltas, weight, eps, overlap=len(deltas) < 2)

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`xkernels.ops.decoder`: one program per token."""
        return rotate(qk, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`xkernels.ops.activation`."""
        return silu_and_mul(gate_up)

    def place(
        self, cache: KvCache, layer: int, qk: torch.Tensor, v: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """`xkernels.ops.decoder`: one pass."""
        return rotate_and_store(qk, v, *turn, cache.keys[layer], cache.values[layer], rows)

    def store(self, cache: KvCache, layer: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """`xkernels.ops.kv_cache`: rows of index 0 are not written."""
        store_kv_cache(k, v, cache.keys[layer], cache.values[layer], rows, skip_index=0)

    def attend(self, cache: KvCache, layer: int, q: torch.Tensor, kv_heads: int, steps: Steps) -> torch.Tensor:
        """`xkernels.ops.attention`, over the rows of each slot."""
        rows, lengths = steps.table()
        shape = (cache.keys.shape[1], kv_heads, cache.width // kv_heads)
        return decode_attention(q, cache.keys[layer].view(shape), cache.values[layer].view(shape), rows, lengths)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of q [B, heads, Q, D] over k, v [B, kv_heads, K, D]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
