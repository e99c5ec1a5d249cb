"""The decoder: prefill of whole prompts, decode of one token for many sequences.

Rows of all sequences lie one after the other in [T, H]; only attention knows where one sequence ends. So the experts
see M = T rows, which is the batch size that config files speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from serving.server.experts import Experts
from serving.server.kvcache import KvCache
from serving.server.recorder import Recorder
from serving.server.spec import DecoderSpec
from serving.server.weights import DecoderWeights, LayerWeights, MlpWeights, MoeWeights
from xkernels.ops.fused_experts import PreparedExperts, prepare_experts

__all__ = ["Decoder", "Prompt"]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BUCKET = 64  # decode reads keys up to the longest sequence, rounded up to this many positions


@dataclass(frozen=True)
class Prompt:
    """One prompt to prefill into `slot`, from position 0."""

    tokens: Sequence[int]
    slot: int


class Decoder:
    """A decoder with its weights, its cache and its experts.

    Args:
        spec: dimensions and rules.
        weights: all weights, on the device; MoE weights are brought into the kernels' layout here.
        cache: keys and values.
        experts: runs and counts the routed experts.
        recorder: keeps expert choices of MoE layers, or None.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        cache: KvCache,
        experts: Experts,
        recorder: Recorder | None = None,
    ) -> None:
        self.spec, self.weights, self.cache, self.experts, self.recorder = spec, weights, cache, experts, recorder
        self.device = weights.embed.device
        self.prepared: dict[int, PreparedExperts] = {
            index: prepare_experts(layer.mlp.w1, layer.mlp.w2)
            for index, layer in enumerate(weights.layers)
            if isinstance(layer.mlp, MoeWeights)
        }
        self.cos, self.sin = _rotary(spec, cache.length, weights.embed)

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Run whole prompts and fill their slots; returns the logits of each last token, float32 [B, vocab]."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        tokens = self._ids([token for prompt in prompts for token in prompt.tokens])
        positions = self._ids([at for length in lengths for at in range(length)])
        rows = self._ids([self.cache.row(p.slot, at) for p, n in zip(prompts, lengths, strict=True) for at in range(n)])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache.store(layer, k, v, rows)
            parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat([_attention(*(x.transpose(0, 1)[None] for x in part), causal=True)[0].transpose(0, 1)
                              for part in parts])  # fmt: skip

        x = self._run(tokens, positions, attend)
        last = self._ids([sum(lengths[: i + 1]) - 1 for i in range(len(lengths))])
        return self._logits(x.index_select(0, last))

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int) -> torch.Tensor:
        """Run one token of each sequence.

        Args:
            tokens: int64 [B]. positions: int64 [B], where each token stands. slots: int64 [B], each at most once; a
                padded row has position -1 and writes to the cache's row 0.
            length: positions to attend to; more than every position.

        Returns:
            Logits float32 [B, vocab]; those of padded rows mean nothing.
        """
        padded = positions < 0
        rows = torch.where(padded, 0, 1 + slots * self.cache.length + positions)
        visible = torch.arange(length, device=self.device)[None, :] <= positions.clamp_min(0)[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.cache.store(layer, k, v, rows)
            keys, values = (x.view(*x.shape[:2], *k.shape[1:]).transpose(1, 2)
                            for x in self.cache.gather(layer, slots, length))  # fmt: skip
            return _attention(q[:, :, None], keys, values, mask=visible[:, None, None])[:, :, 0]

        return self._logits(self._run(tokens, positions.clamp_min(0), attend))

    def span(self, positions: Sequence[int]) -> int:
        """How many positions `decode` has to attend to for these."""
        return min(-(-(max(positions) + 1) // BUCKET) * BUCKET, self.cache.length)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.weights.embed.index_select(0, tokens)
        cos, sin = self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attention_block(index, layer, self._norm(x, layer.input_norm), cos, sin, attend)
            x = x + self._mlp_block(index, layer, self._norm(x, layer.post_norm))
        return x

    def _attention_block(
        self, index: int, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        spec = self.spec
        heads = spec.heads, spec.kv_heads, spec.kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], sum(heads), spec.head_dim)
        q, k, v = qkv.split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        out = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
        return F.linear(out.reshape(x.shape[0], -1), layer.out, layer.out_bias)

    def _mlp_block(self, index: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        moe = layer.mlp
        if isinstance(moe, MlpWeights):
            return _gated(x, moe)
        weights, ids = self.experts.route(moe, x)
        if self.recorder is not None:
            self.recorder.record(index, ids)
        out = self.experts(x, self.prepared[index], weights, ids)
        return out if moe.shared is None else out + _gated(x, moe.shared)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_eps)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(x, self.weights.norm), self.weights.head).float()

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of q [B, heads, Q, D] over k, v [B, kv_heads, K, D]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _gated(x: torch.Tensor, mlp: MlpWeights) -> torch.Tensor:
    gate, up = F.linear(x, mlp.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, mlp.down)


def _rotary(spec: DecoderSpec, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, head_dim], the half table twice (pairs are i and i + head_dim/2)."""
    steps = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=like.device) / spec.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), spec.rope_theta**-steps)
    table = torch.cat([angles, angles], dim=-1)
    return table.cos().to(like.dtype), table.sin().to(like.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
