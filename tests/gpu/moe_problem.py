"""Inputs of the MoE measurements: shapes, weights for both kernels, routings, and an alignment for both."""

from __future__ import annotations

import statistics

import torch

from xkernels.device import live
from xkernels.ops.fused_experts import prepare_experts
from xkernels.ops.scheme import Scheme

SHAPES = {"E64": (64, 6, 1280, 896), "E128": (128, 8, 2048, 768)}
DEV = live()
INNER = 8  # calls of one graph


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, R, C] -> FP8 and float32 scales of 128 x 128 blocks."""
    e, r, c = w.shape
    blocks = w.float().view(e, r // 128, 128, c // 128, 128)
    scale = blocks.abs().amax((2, 4)).clamp(min=1e-10) / 448
    q = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view(w.shape)
    return q, scale


class Problem:
    """One shape and mode: weight copies for both kernels, inputs and routings."""

    def __init__(self, shape: str, mode: str, copies: int = 4, experts: int | None = None) -> None:
        self.E, self.topk, self.H, self.N = SHAPES[shape]
        self.E = experts or self.E
        self.topk = min(self.topk, self.E) if experts is None else self.topk
        self.mode, self.device = mode, DEV.torch_device()
        self.sets = []
        for copy in range(copies):
            g = torch.Generator(device=self.device).manual_seed(copy)
            kw = {"device": self.device, "dtype": torch.bfloat16, "generator": g}
            w1 = torch.randn(self.E, 2 * self.N, self.H, **kw) / 16
            w2 = torch.randn(self.E, self.H, self.N, **kw) / 16
            s1 = s2 = None
            scheme = Scheme()
            if mode == "fp8":
                (w1, s1), (w2, s2) = quantize_blocks(w1), quantize_blocks(w2)
                scheme = Scheme("fp8_block", (128, 128))
            p = prepare_experts(w1, w2, scheme=scheme, w1_scale=s1, w2_scale=s2)
            self.sets.append(({"w1": w1, "w2": w2, "w1_scale": s1, "w2_scale": s2}, p))

    def inputs(self, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator(device=self.device).manual_seed(1000 + seed)
        x = torch.randn(m, self.H, device=self.device, dtype=torch.bfloat16, generator=g) / 8
        logits = torch.randn(m, max(self.E, self.topk), device=self.device, generator=g)
        weights, ids = torch.topk(torch.softmax(logits, -1), self.topk, -1)
        return x, weights.contiguous(), (ids % self.E).int()

    def floor_us(self, m: int, part: str) -> float:
        used = statistics.mean(self.inputs(m, s)[2].unique().numel() for s in range(INNER))
        size = 1 if self.mode == "fp8" else 2
        slots, rate = m * self.topk, 790e12 * (2 if self.mode == "fp8" else 1)
        up = (used * 2 * self.N * self.H * size + m * self.H * 2 + slots * self.N * 2, 4 * slots * self.N * self.H)
        down = (used * self.N * self.H * size + slots * (self.N + self.H) * 2, 2 * slots * self.N * self.H)
        return (
            sum(max(b / 4.3e12, f / rate) for n, (b, f) in {"up": up, "down": down}.items() if part in (n, "both"))
            * 1e6
        )


def align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact-length alignment, the same for both kernels."""
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + block - 1) // block * block
    ends, starts = padded.cumsum(0), counts.cumsum(0) - counts
    total = int(ends[-1])
    out = torch.full((total,), flat.numel(), dtype=torch.int32, device=ids.device)
    expert = flat[order]
    rank = torch.arange(flat.numel(), device=ids.device) - starts[expert]
    out[(ends - padded)[expert] + rank] = order.int()
    blocks = torch.arange(total // block, device=ids.device) * block
    experts_of = torch.searchsorted(ends, blocks, right=True).int()
    return out, experts_of, torch.tensor([total, 0], dtype=torch.int32, device=ids.device)
