"""Sorting of routed tokens by expert into blocks: what a grouped GEMM walks over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xkernels.ops._details import align as _k
from xkernels.ops._details.common import cdiv, next_power_of_2

_TABLE = 16384  # entries of a chunk times buckets: small enough for registers
_LONGEST_CHUNK = 128  # a chunk is as long for every batch size, so that one compile serves them all
_MOST_PARTS = 64
_FILL = 1024
_FEW = 16  # entries of one token, with as many experts as models give it


@dataclass(frozen=True)
class Alignment:
    """Routed tokens in expert order, each expert padded to whole blocks.

    `sorted_ids` int32 [capacity]: flat index `token * topk + slot`; the padding value is `tokens * topk`.
    `expert_ids` int32 [capacity / block]: the expert of each block, -1 for tokens routed to no local expert. The
    blocks of -1 come first. `num_post_padded` int32 [2]: used length of `sorted_ids` (entries beyond it are
    padding), and how many blocks of -1 there are.
    """

    sorted_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_post_padded: torch.Tensor
    block: int


def capacity(numel: int, block: int, num_experts: int) -> int:
    """Length of `sorted_ids` that suffices for any routing of `numel` entries, a multiple of 4.

    Every used expert (and the bucket of -1) wastes at most `block - 1` places; with fewer entries than buckets each
    entry may open a block of its own.
    """
    buckets = num_experts + 1
    bound = numel * block if numel < buckets else numel + buckets * (block - 1)
    return cdiv(bound, 4) * 4


def moe_align_block_size(
    topk_ids: torch.Tensor, block: int, num_experts: int, *, ignore_invalid_expert: bool = False
) -> Alignment:
    """Sort routed tokens by expert, on the device and without a host synchronisation.

    topk_ids: int32 or int64 [tokens, topk], values 0 to num_experts - 1; any other, such as -1, stands for no local
    expert. block: a positive number. Order within an expert is the order of `topk_ids` (stable). ignore_invalid_expert:
    leave entries of no expert out wholly instead of giving them blocks (of expert -1) of their own; whoever reads the
    result must not expect rows for them (`fused_experts` does, to write zeros). Raises ValueError on a wrong rank,
    dtype or block.
    """
    _check(topk_ids, block, num_experts)
    numel, device = topk_ids.numel(), topk_ids.device
    cap = capacity(numel, block, num_experts)
    blocks = cdiv(cap, block)
    sorted_ids = torch.empty(cap, dtype=torch.int32, device=device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=device)
    post = torch.empty(2, dtype=torch.int32, device=device)
    if numel == 0:
        return Alignment(sorted_ids, expert_ids, post.zero_(), block)
    flat = topk_ids.reshape(-1).contiguous()
    buckets = next_power_of_2(num_experts + 1)
    chunk = max(16, min(_LONGEST_CHUNK, _TABLE // buckets))
    lowest = 0 if ignore_invalid_expert else -1
    if numel <= _LONGEST_CHUNK:
        few = numel <= _FEW  # a single warp needs no shared memory to compare its entries
        fill = min(_FILL, next_power_of_2(_FEW * block)) if few else _FILL
        _k.align_one[(1,)](
            flat, sorted_ids, expert_ids, post, numel, cap, blocks, BLOCK=block, CHUNK=_FEW if few else _LONGEST_CHUNK,
            EXPERTS=num_experts, LOWEST=lowest, FILL=fill, num_warps=1 if few else 8,
        )  # fmt: skip
        return Alignment(sorted_ids, expert_ids, post, block)
    sizes = {"CHUNK": chunk, "EXPERTS": num_experts, "BUCKETS": buckets, "LOWEST": lowest}
    part = cdiv(cdiv(numel, chunk), _MOST_PARTS) * chunk
    parts = cdiv(numel, part)
    counts = torch.empty(parts, buckets, dtype=torch.int32, device=device)
    _k.count[(parts,)](flat, counts, sorted_ids, numel, cap, part, FILL=_FILL, **sizes, num_warps=8)
    _k.place[(parts,)](
        flat, counts, sorted_ids, expert_ids, post, numel, part, blocks, ROWS=16, BLOCK=block, **sizes, num_warps=8
    )
    return Alignment(sorted_ids, expert_ids, post, block)


def moe_align_block_size_reference(
    topk_ids: torch.Tensor, block: int, num_experts: int, *, ignore_invalid_expert: bool = False
) -> Alignment:
    """The twin of `moe_align_block_size` in plain torch, one expert after the other."""
    _check(topk_ids, block, num_experts)
    flat = topk_ids.reshape(-1).cpu().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, -1)
    numel = flat.numel()
    cap = capacity(numel, block, num_experts)
    sorted_ids = torch.full((cap,), numel, dtype=torch.int32)
    expert_ids = torch.full((cdiv(cap, block),), -1, dtype=torch.int32)
    at = inactive = 0
    for expert in range(0 if ignore_invalid_expert else -1, num_experts):
        mine = torch.nonzero(flat == expert).flatten().int()
        sorted_ids[at : at + mine.numel()] = mine
        used = cdiv(mine.numel(), block)
        expert_ids[at // block : at // block + used] = expert
        at += used * block
        inactive = used if expert < 0 else inactive
    post = torch.tensor([at, inactive], dtype=torch.int32)
    device = topk_ids.device
    return Alignment(sorted_ids.to(device), expert_ids.to(device), post.to(device), block)


def _check(topk_ids: torch.Tensor, block: int, num_experts: int) -> None:
    if topk_ids.ndim != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64 [tokens, topk], not {topk_ids.dtype} {list(topk_ids.shape)}")
    if not isinstance(block, int) or not isinstance(num_experts, int) or block < 1 or num_experts < 1:
        raise ValueError(f"block and num_experts must be positive whole numbers, not {block} and {num_experts}")
