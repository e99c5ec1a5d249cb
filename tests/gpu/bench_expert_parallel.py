"""Expert parallelism on one GPU: right first, then permute and unpermute against a copy of the same bytes.

Run on a machine with a GPU: `python tests/gpu/bench_expert_parallel.py OUT.json`. Writes one JSON file with device,
versions, command, date, and for each size the fraction of copy bandwidth; exits 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import triton

from xkernels.device import live
from xkernels.ops import expert_parallel as ep
from xkernels.ops.fused_experts import fused_experts_reference, prepare_experts

H, K, E, N = 2048, 8, 128, 256
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}


def tiles(_: int) -> tuple[dict[str, int], dict[str, int]]:
    """The same tile for every number of rows."""
    return TILE, TILE


def median_us(work, flush: torch.Tensor, repeats: int = 50) -> float:  # type: ignore[no-untyped-def]
    """Median device time in microseconds, L2 flushed before each call."""
    device = live()
    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        flush.zero_()
        first, last = device.event(), device.event()
        first.record()
        work()
        last.record()
        times.append(first.elapsed_ms(last) * 1e3)
    return statistics.median(times)


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    where = live().torch_device()
    x = torch.randn(tokens, H, device=where, dtype=torch.bfloat16)
    score, ids = torch.topk(torch.softmax(torch.randn(tokens, E, device=where), -1), K)
    return x, score.float(), ids.int()


def check(group: dist.ProcessGroup) -> dict[str, float]:
    """Largest relative error against the float32 twin per mode, and bits across batches; raises where wrong."""
    where = live().torch_device()
    experts = prepare_experts(torch.randn(E, 2 * N, H, device=where, dtype=torch.bfloat16) / 32,
                              torch.randn(E, H, N, device=where, dtype=torch.bfloat16) / 16)  # fmt: skip
    x, w, ids = inputs(257)
    want = fused_experts_reference(x, experts, w, ids).float()
    errors: dict[str, float] = {}
    for mode in ("fast", "deterministic"):
        lay = ep.ep_layout(group, num_experts=E, hidden=H, topk=K, mode=mode, backend="triton", device=where)
        got = ep.ep_fused_experts(x, experts, w, ids, lay, configs=tiles)
        errors[mode] = float((got.float() - want).norm() / want.norm())
        assert errors[mode] < 1e-2, (mode, errors[mode])
        if mode == "deterministic":
            for count in (1, 7, 64):
                part = ep.ep_fused_experts(x[:count], experts, w[:count], ids[:count], lay, configs=tiles)
                assert torch.equal(part, got[:count]), f"bits differ in a batch of {count}"
    return errors


def bandwidth(tokens: int, group: dist.ProcessGroup) -> dict[str, float | int]:
    """permute and unpermute of `tokens` x K rows against copies that move the same bytes."""
    where = live().torch_device()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=where)
    x, w, ids = inputs(tokens)
    lay = ep.ep_layout(group, num_experts=E, hidden=H, topk=K, mode="deterministic", backend="triton", device=where)
    dest, per_token = ep._destinations(ids, lay)
    # As if every slot went to another rank: the rows of the send buffer are in an order of their own.
    place = torch.randperm(dest.numel(), device=where).int()
    rows = ep._permute(x, place, per_token, dest.numel())
    assert torch.equal(rows[place.long()], x.repeat_interleave(K, 0))
    sent = ep.Dispatched(rows, ids, w, place.view(tokens, K), w, (dest.numel(),), (dest.numel(),))
    y = torch.randn_like(rows)
    got = ep._unpermute(y, sent, lay, None).float()
    want = (y[place.long()].view(tokens, K, H).float() * w[:, :, None]).sum(1)
    assert float((got - want).norm() / want.norm()) < 5e-3
    bytes_permute = x.numel() * 2 + rows.numel() * 2
    bytes_back = y.numel() * 2 + x.numel() * 2
    source = torch.randn(bytes_permute // 4, device=where).bfloat16()
    target = torch.empty_like(source)
    copy_us = median_us(lambda: target.copy_(source), flush)
    permute_us = median_us(lambda: ep._permute(x, place, per_token, dest.numel()), flush)
    back_us = median_us(lambda: ep._unpermute(y, sent, lay, None), flush)
    route_us = median_us(lambda: ep._route(dest, lay), flush)
    rate = 2 * source.numel() * 2 / copy_us
    return {
        "tokens": tokens, "bytes": bytes_permute, "copy_us": round(copy_us, 2), "copy_gb_s": round(rate / 1e3, 1),
        "permute_us": round(permute_us, 2), "permute_of_copy": round(bytes_permute / permute_us / rate, 3),
        "unpermute_us": round(back_us, 2), "unpermute_of_copy": round(bytes_back / back_us / rate, 3),
        "route_us": round(route_us, 2),
    }  # fmt: skip


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29555", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    errors = check(group)
    # 64 MiB of rows and four times as much.
    sizes = [bandwidth((64 << 20) * scale // (2 * H * (K + 1)), group) for scale in (1, 4)]
    device = live()
    body = {
        "schema": 1, "name": "expert-parallel", "device": device.identity().name, "arch": device.arch(),
        "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python tests/gpu/bench_expert_parallel.py OUT.json", "relative_error": errors, "sizes": sizes,
        "grids": [vars(use) for use in ep.grids()],
    }  # fmt: skip
    out.write_text(json.dumps(body, indent=1) + "\n")
    for row in sizes:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    print("errors", errors, file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
