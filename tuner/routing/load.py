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

    def ids(self, index: int, tokens: int, topk: int, experts: int, shared: int = 0) -> np.ndarray[Any, Any]:
        """int32 [tokens, topk] of routing `index`; recordings shorter than `tokens` are repeated.

        `experts` are those of the whole model, the last `shared` of them shared ones, as the engine that recorded
        counts them.

        Raises:
            UsageError: the file is damaged, has fewer slots than `topk`, names an expert that does not exist, or never
                a shared one.
        """
        path = self.file(index)
        ids = _read(path)
        if ids.ndim != 2 or not ids.shape[0] or ids.dtype.kind not in "iu":
            raise UsageError(f"is {ids.dtype} {list(ids.shape)}, not integer [tokens, topk]", file=path)
        if ids.shape[1] < topk:
            raise UsageError(f"has {ids.shape[1]} experts per token, fewer than {topk}", file=path)
        ids = ids[:, :topk]
        for expert in (int(ids.min()), int(ids.max())):  # before the cast: a wide number would wrap into the range
            if not -1 <= expert < experts:
                raise UsageError(f"names expert {expert} of {experts}", file=path)
        if shared and int(ids.max()) < experts - shared:
            raise UsageError(f"names no shared expert, which are those from {experts - shared}", file=path,
                             fix="record with fused shared experts, or tune without them")  # fmt: skip
        ids = ids.astype(np.int32)
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
    everywhere = problem.routed * problem.ep
    out = []
    for index, (weights, _) in enumerate(made):
        ids = torch.from_numpy(recording.ids(index, size, problem.topk, everywhere + problem.shared, problem.shared))
        # Each rank has the shared experts, after its own routed ones; the recording has them after everybody's.
        away = torch.where(ids < everywhere, -1, ids - everywhere + problem.routed)
        out.append((weights, torch.where(ids < problem.routed, ids, away).to(device)))
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
