"""Recording of expert choices, so that a tuner can time the routing that really happens (`--record-routing`).

Files are numpy arrays `topk_ids_layer{L}_idx{I}.npy` (int32 [tokens, topk]), L counting all decoder layers from 0 and
I the snapshots of that layer. A snapshot is one prefill of at least `min_tokens` rows; the first `snapshots` of each
MoE layer are kept, so that a reader that walks 100 samples over the MoE layers finds every file it asks for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moegate.errors import UsageError

__all__ = ["Recorder", "snapshots_for"]

SAMPLES = 100  # what tuners walk over


def snapshots_for(moe_layers: int) -> int:
    """Snapshots per layer that let a reader take `SAMPLES` samples, each from another (layer, snapshot)."""
    return -(-SAMPLES // moe_layers)


class Recorder:
    """Keeps the first snapshots of every MoE layer in a new or empty folder.

    Args:
        folder: where the files go.
        moe_layers: how many layers record.
        min_tokens: rows that a step must have; smaller steps (decode) are passed over.

    Raises:
        UsageError: the folder holds recordings already.
    """

    def __init__(self, folder: Path, moe_layers: int, min_tokens: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob("topk_ids_layer*_idx*.npy")):
            raise UsageError("holds recordings already", file=folder, fix="name a new folder")
        self.folder, self.min_tokens = folder, min_tokens
        self.wanted = snapshots_for(moe_layers)
        self.counts: dict[int, int] = {}

    def record(self, layer: int, ids: torch.Tensor) -> None:
        """Keep `ids` int32 [tokens, topk] of one layer, if it is still wanted."""
        seen = self.counts.get(layer, 0)
        if ids.shape[0] < self.min_tokens or seen >= self.wanted:
            return
        target = self.folder / f"topk_ids_layer{layer}_idx{seen}.npy"
        partial = target.with_suffix(".tmp")
        with partial.open("wb") as stream:
            np.save(stream, ids.detach().to("cpu", torch.int32).numpy())
        partial.replace(target)
        self.counts[layer] = seen + 1
