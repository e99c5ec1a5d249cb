"""The decoder: prefill of whole prompts, decode of one token for many sequences.

Rows of all sequences lie one after the other in [T, H]; only attention knows where one sequence ends. So the experts
see M = T rows, which is the batch size that config files speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from serving.server.experts import Experts
from serving.server.few_rows import FEW_ROWS, FewRows
from serving.server.glue import Glue, Steps, TorchGlue, TritonGlue, attention
from serving.server.kvcache import KvCache
from serving.server.recorder import Recorder
from serving.server.spec import DecoderSpec
from serving.server.weights import DecoderWeights, LayerWeights, MlpWeights, MoeWeights
from xkernels.ops.prepared import PreparedExperts

__all__ = ["Decoder", "Prompt"]

Turn = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[int, torch.Tensor, torch.Tensor, Turn], torch.Tensor]
"""(layer, queries and keys [T, heads + kv_heads, D] before their rotation, values, (cos, sin)) -> [T, heads, D]."""
Beside = Callable[[Callable[[], torch.Tensor], Callable[[], torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
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
        self.spec, self.cache, self.experts, self.recorder = spec, cache, experts, recorder
        self.device = weights.embed.device
        self.glue: Glue = TritonGlue() if experts.fused else TorchGlue()
        self.beside: Beside = _in_turn  # how shared and routed experts run: a capture may put them side by side
        self.prepared: dict[int, PreparedExperts] = {
            index: experts.prepare(layer.mlp)
            for index, layer in enumerate(weights.layers)
            if isinstance(layer.mlp, MoeWeights)
        }
        self.weights = _without_experts(weights)
        self.cos, self.sin = _rotary(spec, cache.length, weights.embed)
        self.few: FewRows | None = None
        if experts.fused:
            turn = self.cos, self.sin
            self.few = FewRows(spec, self.weights, cache, experts, self.prepared, turn, recorder)

    def prefill(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Run whole prompts and fill their slots; returns the logits of each last token, float32 [B, vocab]."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        tokens = self._ids([token for prompt in prompts for token in prompt.tokens])
        positions = self._ids([at for length in lengths for at in range(length)])
        rows = self._ids([self.cache.row(p.slot, at) for p, n in zip(prompts, lengths, strict=True) for at in range(n)])

        def attend(layer: int, qk: torch.Tensor, v: torch.Tensor, turn: Turn) -> torch.Tensor:
            turned = self.glue.rotate(qk, *turn)
            q, k = turned[:, : self.spec.heads], turned[:, self.spec.heads :]
            self.glue.store(self.cache, layer, k, v, rows)
            parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat([_causal(*part) for part in parts])

        last = self._ids([sum(lengths[: i + 1]) - 1 for i in range(len(lengths))])
        return self._run(tokens, positions, attend, last)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int) -> torch.Tensor:
        """Run one token of each sequence.

        Args:
            tokens: int64 [B]. positions: int64 [B], where each token stands. slots: int64 [B], each at most once; a
                padded row has position -1 and writes to the cache's row 0.
            length: positions to attend to; more than every position.

        Returns:
            Logits float32 [B, vocab]; those of padded rows mean nothing.
        """
        if self.few is not None and tokens.shape[0] <= FEW_ROWS:
            return self.few.decode(tokens, positions, slots, length)
        steps = Steps(self.cache, positions, slots, length)

        def attend(layer: int, qk: torch.Tensor, v: torch.Tensor, turn: Turn) -> torch.Tensor:
            q = self.glue.place(self.cache, layer, qk, v, turn, steps.rows)
            return self.glue.attend(self.cache, layer, q, self.spec.kv_heads, steps)

        return self._run(tokens, steps.positions, attend)

    def span(self, positions: Sequence[int]) -> int:
        """How many positions `decode` has to attend to for these."""
        return min(-(-(max(positions) + 1) // BUCKET) * BUCKET, self.cache.length)

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All layers and the logits; `last` picks the rows that logits are wanted of."""
        x = self.weights.embed.index_select(0, tokens)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        deltas: tuple[torch.Tensor, ...] = ()
        for index, layer in enumerate(self.weights.layers):
            x, normed = self.glue.add_norm(x, deltas, layer.input_norm, self.spec.rms_eps)
            attended = self._attention_block(index, layer, normed, cos, sin, attend)
            x, normed = self.glue.add_norm(x, (attended,), layer.post_norm, self.spec.rms_eps)
            deltas = self._mlp_block(index, layer, normed)
        if last is not None:
            x, deltas = x.index_select(0, last), tuple(delta.index_select(0, last) for delta in deltas)
        _, normed = self.glue.add_norm(x, deltas, self.weights.norm, self.spec.rms_eps)
        return F.linear(normed, self.weights.head).float()

    def _attention_block(
        self, index: int, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        spec = self.spec
        both = spec.heads + spec.kv_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], both + spec.kv_heads, spec.head_dim)
        qk, v = qkv[:, :both], qkv[:, both:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (
                F.rms_norm(part, weight.shape, weight, spec.rms_eps)
                for part, weight in ((qk[:, : spec.heads], layer.q_norm), (qk[:, spec.heads :], layer.k_norm))
            )
            qk = torch.cat([q, k], dim=1)
        out = attend(index, qk, v, (cos, sin))
        return F.linear(out.reshape(x.shape[0], -1), layer.out, layer.out_bias)

    def _mlp_block(self, index: int, layer: LayerWeights, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the block adds to the residual: one or two tensors [T, H]."""
        moe = layer.mlp
        if isinstance(moe, MlpWeights):
            return (self._gated(x, moe),)
        weights, ids = self.experts.route(moe, x)
        if self.recorder is not None:
            self.recorder.record(index, ids)
        prepared, shared = self.prepared[index], moe.shared
        if shared is None:
            return (self.experts(x, prepared, weights, ids, index),)
        return self.beside(lambda: self._gated(x, shared), lambda: self.experts(x, prepared, weights, ids, index))

    def _gated(self, x: torch.Tensor, mlp: MlpWeights) -> torch.Tensor:
        return F.linear(self.glue.silu_mul(F.linear(x, mlp.gate_up)), mlp.down)

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _without_experts(weights: DecoderWeights) -> DecoderWeights:
    """The same weights without the experts' matrices: those live on in the kernels' layout only."""

    def strip(layer: LayerWeights) -> LayerWeights:
        moe = layer.mlp
        if not isinstance(moe, MoeWeights):
            return layer
        return replace(layer, mlp=replace(moe, w1=moe.w1.new_empty(0), w2=moe.w2.new_empty(0)))

    return replace(weights, layers=tuple(strip(layer) for layer in weights.layers))


def _in_turn(
    first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return first(), second()


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention within one prompt: q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return attention(q, k, v, causal=True)[0].transpose(0, 1)


def _rotary(spec: DecoderSpec, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, head_dim], the half table twice (pairs are i and i + head_dim/2)."""
    steps = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=like.device) / spec.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), spec.rope_theta**-steps)
    table = torch.cat([angles, angles], dim=-1)
    return table.cos().to(like.dtype), table.sin().to(like.dtype)
