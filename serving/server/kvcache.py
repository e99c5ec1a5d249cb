"""Keys and values of every sequence, one fixed slot each."""

from __future__ import annotations

import torch

__all__ = ["KvCache"]


class KvCache:
    """Keys and values [layers, 1 + slots * length, kv_heads * head_dim]; token p of slot s is row 1 + s * length + p.

    Row 0 belongs to no sequence: padded rows of a graph write there, so that padding can never change a result.
    Memory is zeroed once, because a masked key of NaN would still poison what it is weighted into.
    """

    def __init__(
        self, layers: int, slots: int, length: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.length, self.width = slots, length, width
        shape = (layers, 1 + slots * length, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def row(self, slot: int, position: int) -> int:
        """The row of one token."""
        return 1 + slot * self.length + position

    def gather(self, layer: int, slots: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` positions of `slots` [B]: two tensors [B, length, width]."""
        shape = (self.slots, self.length, self.width)
        keys = self.keys[layer, 1:].view(shape)[:, :length]
        values = self.values[layer, 1:].view(shape)[:, :length]
        return keys.index_select(0, slots), values.index_select(0, slots)
