"""One rank of a group over gloo, started by test_expert_parallel: runs a scenario, writes what it saw as RANK.npz.

usage: ep_worker.py SCENARIO RANK WORLD FOLDER
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from xkernels.ops import expert_parallel as ep
from xkernels.ops.fused_experts import PreparedExperts, fused_experts_reference, prepare_experts

E, H, N, K = 8, 128, 16, 2
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
Result = dict[str, np.ndarray]


def weights(dtype: torch.dtype, part: slice = slice(None)) -> PreparedExperts:
    g = torch.Generator().manual_seed(1)
    w1, w2 = torch.randn(E, 2 * N, H, generator=g) / 8, torch.randn(E, H, N, generator=g) / 4
    return prepare_experts(w1[part].to(dtype), w2[part].to(dtype))


def tokens(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(count, H, generator=g).to(dtype)
    score, ids = torch.topk(torch.softmax(torch.randn(count, E, generator=g), -1), K)
    return x, score, ids.int()


def layer(group: dist.ProcessGroup, mode: str, dtype: torch.dtype, **options: object) -> ep.EpLayout:
    return ep.ep_layout(
        group, num_experts=E, hidden=H, topk=K, mode=mode, backend="triton", activations=dtype, **options
    )  # type: ignore[arg-type]


def forward(lay: ep.EpLayout, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ep.ep_fused_experts(x, weights(x.dtype, lay.local_experts), w, ids, lay, configs=lambda _: (TILE, TILE))


def shares(count: int, world: int) -> list[slice]:
    per = -(-count // world)
    return [slice(min(r * per, count), min((r + 1) * per, count)) for r in range(world)]


def bits(rank: int, world: int, alone: dist.ProcessGroup) -> Result:
    """Deterministic outputs of the same tokens in batches of 1, 7 and 64, alone and over every order of the ranks."""
    out: Result = {}
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16):
        x, w, ids = tokens(64, dtype)
        name = str(dtype).removeprefix("torch.")
        lay = layer(group, "deterministic", dtype)
        for count in (1, 7, 64):
            mine = shares(count, world)[rank]
            out[f"{name}-{count}"] = forward(lay, x[mine], w[mine], ids[mine]).float().numpy()
        if rank == 0:
            out[f"{name}-alone"] = forward(layer(alone, "deterministic", dtype), x, w, ids).float().numpy()
            out[f"{name}-reference"] = fused_experts_reference(x, weights(dtype), w, ids).float().numpy()
        mine = shares(64, world)[rank]
        halves = layer(group, "deterministic", dtype, parts=2)
        out[f"{name}-halves"] = forward(halves, x[mine], w[mine], ids[mine]).float().numpy()
        out[f"{name}-fast"] = forward(layer(group, "fast", dtype), x[mine], w[mine], ids[mine]).float().numpy()
        if dtype == torch.float32:
            for order in itertools.permutations(range(world)):
                mine = shares(7, world)[order[rank]]
                out[f"{name}-order-{''.join(map(str, order))}"] = forward(lay, x[mine], w[mine], ids[mine]).numpy()
    return out


def shapes(rank: int, world: int, alone: dist.ProcessGroup) -> Result:
    """Empty ranks, all tokens to one rank, filtered experts, FP8 rows, a slow rank; and the wire of each dtype."""
    out: Result = {}
    group = dist.group.WORLD
    x, w, ids = tokens(9, torch.float32)
    before = (x.clone(), w.clone(), ids.clone())
    cases: dict[str, tuple[slice, torch.Tensor]] = {
        "one-rank-holds-all": (slice(0, 9) if rank == 2 else slice(0, 0), ids),
        "all-to-one": (shares(9, world)[rank], ids % 2),
        "filtered": (shares(9, world)[rank], torch.where(ids == 3, -1, ids)),
        "nobody": (slice(0, 0), ids),
    }
    for mode in ("fast", "deterministic"):
        for name, (mine, chosen) in cases.items():
            out[f"{mode}-{name}"] = forward(layer(group, mode, torch.float32), x[mine], w[mine], chosen[mine]).numpy()
            if rank == 0:
                out[f"want-{name}"] = fused_experts_reference(x, weights(torch.float32), w, chosen).numpy()
        time.sleep(5 if rank == 1 and mode == "fast" else 0)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, w, ids), strict=True))
    steps: list[ep.Message] = []
    mine = shares(9, world)[rank]
    lay = layer(group, "fast", torch.float32, parts=3, trace=steps)
    out["thirds"] = forward(lay, x[mine], w[mine], ids[mine]).numpy()
    out["thirds-steps"] = np.array([message.step for message in steps])
    if rank == 0:
        out["want-thirds"] = fused_experts_reference(x, weights(torch.float32), w, ids).numpy()
    for quant in (None, "fp8_w8a8"):
        trace: list[ep.Message] = []
        half = x.bfloat16()[shares(9, world)[rank]]
        mine = shares(9, world)[rank]
        lay = layer(group, "fast", torch.bfloat16, quant=quant, trace=trace)
        out[f"wire-{quant}"] = forward(lay, half, w[mine], ids[mine]).float().numpy()
        out[f"trace-{quant}"] = np.array([f"{m.step}:{m.dtype}:{m.row_bytes}" for m in trace])
        out[f"rows-{quant}"] = np.array([sum(m.sent) for m in trace if m.step == "tokens"])
    return out


def refusals(rank: int, world: int, alone: dist.ProcessGroup) -> Result:
    """Capacity: every rank refuses alike, before a row moves, and the group still works."""
    x, w, ids = tokens(8, torch.float32)
    mine = shares(8, world)[rank]
    said = ""
    try:
        forward(layer(dist.group.WORLD, "fast", torch.float32, capacity=3), x[mine], w[mine], ids[mine] % 2)
    except ep.EpCapacityExceeded as error:
        said = str(error)
    after = forward(layer(dist.group.WORLD, "fast", torch.float32, capacity=8), x[mine], w[mine], ids[mine] % 2)
    return {"said": np.array(said), "after": after.numpy()}


def killed(rank: int, world: int, alone: dist.ProcessGroup) -> Result:
    """One rank dies between two layers: every other rank gets a clear error within the timeout."""
    x, w, ids = tokens(8, torch.float32)
    mine = shares(8, world)[rank]
    lay = layer(dist.group.WORLD, "fast", torch.float32)
    forward(lay, x[mine], w[mine], ids[mine])
    if rank == 3:
        os._exit(9)
    began = time.monotonic()
    try:
        forward(lay, x[mine], w[mine], ids[mine])
    except ep.EpPeerLost as error:
        return {"said": np.array(str(error)), "seconds": np.array(time.monotonic() - began)}
    return {"said": np.array("nothing")}


SCENARIOS: dict[str, Callable[[int, int, dist.ProcessGroup], Result]] = {
    "bits": bits, "shapes": shapes, "refusals": refusals, "killed": killed,
}  # fmt: skip


def main() -> None:
    scenario, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    # A file and not a port, which another could have taken meanwhile; seconds for a busy machine.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
                            timeout=timedelta(seconds=120))  # fmt: skip
    groups = [dist.new_group([r]) for r in range(world)]
    np.savez(folder / f"{rank}.npz", **SCENARIOS[scenario](rank, world, groups[rank]))  # type: ignore[arg-type]
    os._exit(0)


main()
