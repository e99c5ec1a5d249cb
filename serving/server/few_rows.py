"""The decode step of at most FEW_ROWS sequences: seven kernels to an MoE layer, five to a dense one.

At so few rows a step should cost the reading of its weights and the start of its kernels. An MoE layer is: the sum of
all that came before, its norm and query, key, value; attention of the new tokens and its output in two kernels; norm,
router and shared gates; choice of experts, their alignment and the shared down projection; and the two tuned
projections of the routed experts. Two more end a step: the last sum with its norm, and the logits. They run on one
stream, all but the tuned ones with their weights under way while their predecessor ends (`xkernels.ops.few_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from serving.server.experts import Experts
from serving.server.kvcache import KvCache
from serving.server.recorder import Recorder
from serving.server.spec import DecoderSpec
from serving.server.weights import DecoderWeights, LayerWeights, MlpWeights
from xkernels.ops.few_rows import FEW_ROWS, add_linear, choose_experts, norm_gate, norm_linear, norm_rows, row_logits
from xkernels.ops.fused_experts import expert_slots
from xkernels.ops.new_token import HeadRules, NewTokens, new_token_attention
from xkernels.ops.prepared import PreparedExperts

__all__ = ["FEW_ROWS", "FewRows"]


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "few_rows_qkv": norm_linear, "few_rows_attention": new_token_attention, "few_rows_router": norm_gate,
    "few_rows_topk": choose_experts, "few_rows_down": add_linear, "few_rows_norm": norm_rows,
    "few_rows_logits": row_logits,
}  # fmt: skip


class FewRows:
    """Decode steps over the kernels of few rows.

    Args:
        spec, weights, cache, experts, recorder: the decoder's.
        prepared: routed experts by layer.
        turn: cosines and sines [positions, head_dim].

    `functions`: operator -> the function that does it, for the proof.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        cache: KvCache,
        experts: Experts,
        prepared: Mapping[int, PreparedExperts],
        turn: tuple[torch.Tensor, torch.Tensor],
        recorder: Recorder | None,
    ) -> None:
        self.weights, self.cache, self.experts, self.prepared = weights, cache, experts, prepared
        self.recorder, self.eps = recorder, spec.rms_eps
        self.functions = {**_FUNCTIONS, **({} if experts.block(1) is None else {"few_rows_experts": expert_slots})}
        self.rules = [
            HeadRules(spec.heads, spec.kv_heads, *turn, spec.rms_eps, layer.q_norm, layer.k_norm)
            for layer in weights.layers
        ]

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int) -> torch.Tensor:
        """As `Decoder.decode`, for at most FEW_ROWS rows."""
        steps = NewTokens(positions, slots, self.cache.length, length)
        # torch's kernel begins after all that came before it has ended, which kernels that overlap rely on.
        x = self.weights.embed.index_select(0, tokens)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            x, qkv = norm_linear(x, delta, layer.input_norm, self.eps, layer.qkv, layer.qkv_bias)
            x = new_token_attention(
                qkv, self.rules[index], steps, self.cache.keys[index], self.cache.values[index], layer.out,
                layer.out_bias, x,
            )  # fmt: skip
            x, delta = self._feed_forward(index, layer, x)
        return row_logits(norm_rows(x, delta, self.weights.norm, self.eps), self.weights.head)

    def _feed_forward(
        self, index: int, layer: LayerWeights, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual [T, H] after the block, and what is still to be added to it: slots [T, S, H]."""
        mlp = layer.mlp
        if isinstance(mlp, MlpWeights):
            _, _, gated = norm_gate(x, layer.post_norm, self.eps, None, mlp.gate_up)
            return add_linear(gated, mlp.down, x), None
        shared = mlp.shared
        normed, logits, gated = norm_gate(
            x, layer.post_norm, self.eps, mlp.router, None if shared is None else shared.gate_up
        )
        beside = None if shared is None else (gated, shared.down)
        block = self.experts.block(x.shape[0])
        chosen, x = choose_experts(logits, self.experts.router, mlp.correction, block, beside, x)
        if self.recorder is not None:
            self.recorder.record(index, chosen.ids)
        return x, self.experts.slots(normed, self.prepared[index], chosen, index)
