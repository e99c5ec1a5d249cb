"""Recorded routing: which experts a served model's tokens really chose, read safely and indexed without gaps.

A recording is a folder of files `topk_ids_layer{L}_idx{S}.{npy,safetensors,pt}`: snapshot S of decoder layer L, ids
[tokens, topk]. Snapshot counts may differ from any other tool's expectation: routing i comes from MoE layer
`i % layers` and snapshot `(i // layers) % snapshots`, so that no index ever points at a file that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moegate.errors import UsageError
from tuner.problem import Problem
from tuner.routing.made import make_routes
from tuner.routing.source import KINDS, recorded_files

__all__ = ["Recording", "load_recording", "routes_for"]

_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Recording:
    """A folder of recorded routings. `layers` are the recorded MoE layers, ascending."""

    folder: Path
    files: dict[tuple[int, int], Path]
    layers: tuple[int, ...]

    def file(self, index: int) -> Path:
        """The file of routing `index` (any non-negative number)."""
        layer = self.layers[index % len(self.layers)]
        snapshots = sorted(snapshot for at, snapshot in self.files if at == layer)
        return self.files[layer, snapshots[(index // len(self.layers)) % len(snapshots)]]

    def ids(self, index: int, tokens: int, topk: int, experts: int) -> np.ndarray[Any, Any]:
        """int32 [tokens, topk] of routing `index`; recordings shorter than `tokens` are repeated.

        Raises:
            UsageError: the file is damaged, has fewer slots than `topk`, or names an expert that does not exist.
        """
        path = self.file(index)
        ids = _read(path)
        if ids.ndim != 2 or not ids.shape[0] or ids.dtype.kind not in "iu":
            raise UsageError(f"is {ids.dtype} {list(ids.shape)}, not integer [tokens, topk]", file=path)
        if ids.shape[1] < topk:
            raise UsageError(f"has {ids.shape[1]} experts per token, fewer than {topk}", file=path)
        ids = ids[:, :topk].astype(np.int32)
        if ids.min() < -1 or ids.max() >= experts:
            raise UsageError(f"names expert {int(ids.max())} of {experts}", file=path)
        return np.resize(ids, (tokens, topk)) if ids.shape[0] < tokens else np.ascontiguousarray(ids[:tokens])


@cache
def load_recording(folder: Path) -> Recording:
    """List a recording. UsageError where the folder holds none."""
    files = recorded_files(folder)
    return Recording(folder, files, tuple(sorted({layer for layer, _ in files})))


def routes_for(
    problem: Problem, size: int, count: int, *, device: torch.device, seed: int, source: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` routings from `source`: a kind of `tuner.routing.source`, or a folder of recordings."""
    made = make_routes(problem, size, count, device=device, seed=seed, kind=source if source in KINDS else "uniform")
    if source in KINDS:
        return made
    recording = load_recording(Path(source))
    out = []
    for index, (weights, _) in enumerate(made):
        ids = torch.from_numpy(recording.ids(index, size, problem.topk, problem.routed * problem.ep + problem.shared))
        if problem.ep > 1:
            ids = torch.where(ids < problem.routed, ids, -1)
        out.append((weights, ids.to(device)))
    return out


def _read(path: Path) -> np.ndarray[Any, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise UsageError(f"is larger than {_MAX_BYTES} bytes", file=path)
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            tensors = load_file(path)
            return np.asarray(tensors["topk_ids"] if "topk_ids" in tensors else next(iter(tensors.values())))
        tensor = torch.load(path, map_location="cpu", weights_only=True)
        return np.asarray(tensor.numpy())
    except UsageError:
        raise
    except Exception as error:  # each reader has its own family of errors for a damaged file
        raise UsageError(f"cannot be read: {type(error).__name__}: {error}"[:300], file=path) from None
