"""The decoder against a plain float32 transcription of the models, prefill and decode, alone and in company."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from serving.server.batcher import Batcher, Request
from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.kvcache import KvCache
from serving.server.spec import DecoderSpec, spec_from
from serving.server.weights import MoeWeights, Random, build
from xkernels.device import CpuDevice

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
DEEPSEEK = {
    **BASE, "architectures": ["DeepseekV2ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "use_mla": False,
}  # fmt: skip
CONFIGS = {
    "deepseek": DEEPSEEK,
    "deepseek-grouped": {
        **DEEPSEEK, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "topk_method": "group_limited_greedy",
    },
    "deepseek-v3": {
        **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "mixtral": {
        **BASE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
    "qwen3": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
        "moe_intermediate_size": 24, "num_key_value_heads": 1, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    "attention-bias": {**DEEPSEEK, "attention_bias": True, "tie_word_embeddings": True},
}  # fmt: skip


class Biased(Random):
    """Random weights whose biases are not zero and whose norms are not one."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().get(name, shape)
        if len(shape) > 1:
            return tensor
        number = sum(map(ord, name))
        return tensor + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(number))


def make(config: dict, slots: int = 4, length: int = 48, backend: str = "torch") -> Decoder:
    spec = spec_from(config)
    cpu = torch.device("cpu")
    cache = KvCache(spec.layers, slots, length, spec.kv_heads * spec.head_dim, torch.float32, cpu)
    experts = Experts(spec, torch.float32, CpuDevice(), backend, None)
    weights = build(spec, Biased(3, torch.float32, cpu))
    decoder = Decoder(spec, weights, cache, experts)
    assert all(decoder.weights.layers[i].mlp.w1.numel() == 0 for i in spec.moe_layers), "held once, in one layout"
    decoder.plain = weights  # type: ignore[attr-defined]
    return decoder


def plain_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """All logits [T, vocab] of one sequence: no cache, no batching, one loop per token, head and expert."""
    spec, weights = decoder.spec, decoder.plain  # type: ignore[attr-defined]
    x = weights.embed[tokens]
    for layer in weights.layers:
        x = x + plain_attention(spec, layer, plain_norm(x, layer.input_norm, spec.rms_eps))
        y = plain_norm(x, layer.post_norm, spec.rms_eps)
        x = x + (plain_moe(spec, layer.mlp, y) if isinstance(layer.mlp, MoeWeights) else plain_mlp(layer.mlp, y))
    return plain_norm(x, weights.norm, spec.rms_eps) @ weights.head.T


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    out = torch.empty_like(x)
    half = x.shape[1] // 2
    for t in range(x.shape[0]):
        for i in range(half):
            angle = t * theta ** (-2 * i / x.shape[1])
            a, b = x[t, i], x[t, i + half]
            out[t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def plain_attention(spec: DecoderSpec, layer, x: torch.Tensor) -> torch.Tensor:
    dim = spec.head_dim
    qkv = x @ layer.qkv.T
    qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias
    heads = qkv.split(dim, dim=1)
    queries, keys = heads[: spec.heads], heads[spec.heads : spec.heads + spec.kv_heads]
    values = heads[spec.heads + spec.kv_heads :]
    mask = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)
    outs = []
    for h in range(spec.heads):
        q, k = queries[h], keys[h * spec.kv_heads // spec.heads]
        if layer.q_norm is not None:
            q, k = plain_norm(q, layer.q_norm, spec.rms_eps), plain_norm(k, layer.k_norm, spec.rms_eps)
        scores = plain_rotate(q, spec.rope_theta) @ plain_rotate(k, spec.rope_theta).T / math.sqrt(dim) + mask
        outs.append(scores.softmax(-1) @ values[h * spec.kv_heads // spec.heads])
    out = torch.cat(outs, 1) @ layer.out.T
    return out if layer.out_bias is None else out + layer.out_bias


def plain_mlp(mlp, x: torch.Tensor) -> torch.Tensor:
    width = mlp.down.shape[1]
    gate, up = x @ mlp.gate_up[:width].T, x @ mlp.gate_up[width:].T
    return (gate * gate.sigmoid() * up) @ mlp.down.T


def plain_moe(spec: DecoderSpec, moe: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x) if moe.shared is None else plain_mlp(moe.shared, x)
    width = spec.expert_width
    for t in range(x.shape[0]):
        logits = moe.router @ x[t]
        scores = logits.softmax(0) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if moe.correction is None else scores + moe.correction
        allowed = set(range(spec.experts))
        if spec.groups > 1:
            groups = choice.view(spec.groups, -1)
            rank = groups.amax(1) if moe.correction is None else groups.sort(1).values[:, -2:].sum(1)
            best = rank.argsort(descending=True)[: spec.top_groups].tolist()
            size = groups.shape[1]
            allowed = {e for g in best for e in range(g * size, (g + 1) * size)}
        chosen = sorted(allowed, key=lambda e: -choice[e].item())[: spec.topk]
        total = sum(scores[e].item() for e in chosen)
        for e in chosen:
            weight = scores[e].item() / (total if spec.renormalise else 1.0) * spec.routed_scaling
            gate, up = moe.w1[e, :width] @ x[t], moe.w1[e, width:] @ x[t]
            out[t] += weight * (moe.w2[e] @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_equal_a_plain_transcription(name: str) -> None:
    decoder = make(CONFIGS[name])
    draw = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 96, (n,), generator=draw).tolist() for n in (7, 1, 12)]
    slots = (2, 0, 3)
    with torch.inference_mode():
        got = decoder.prefill([Prompt(s[:-1] or s, slot) for s, slot in zip(sequences, slots, strict=True)])
        for row, sequence in enumerate(sequences):
            want = plain_logits(decoder, sequence[:-1] or sequence)[-1]
            torch.testing.assert_close(got[row], want, rtol=2e-4, atol=2e-4)
        # Two of the three go on together, one of them from position 0 again over a used slot.
        positions = torch.tensor([len(sequences[0]) - 1, len(sequences[2]) - 1])
        logits = decoder.decode(torch.tensor([sequences[0][-1], sequences[2][-1]]), positions, torch.tensor([2, 3]), 48)
        for row, sequence in enumerate((sequences[0], sequences[2])):
            torch.testing.assert_close(logits[row], plain_logits(decoder, sequence)[-1], rtol=2e-4, atol=2e-4)


def test_a_used_slot_forgets_its_last_sequence() -> None:
    decoder = make(DEEPSEEK)
    with torch.inference_mode():
        decoder.prefill([Prompt(list(range(20, 40)), 1)])
        fresh = decoder.prefill([Prompt([5, 6, 7], 1)])
        step = decoder.decode(torch.tensor([8]), torch.tensor([3]), torch.tensor([1]), 48)
    torch.testing.assert_close(fresh[0], plain_logits(decoder, [5, 6, 7])[-1], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(step[0], plain_logits(decoder, [5, 6, 7, 8])[-1], rtol=2e-4, atol=2e-4)


def test_the_cache_holds_each_token_in_its_row() -> None:
    decoder = make(DEEPSEEK)
    cache = decoder.cache
    with torch.inference_mode():
        decoder.prefill([Prompt([1, 2, 3], 0), Prompt([1, 2], 2)])
    used = cache.keys[0].abs().sum(1) > 0
    rows = [cache.row(0, 0), cache.row(0, 1), cache.row(0, 2), cache.row(2, 0), cache.row(2, 1)]
    assert used.nonzero()[:, 0].tolist() == rows
    torch.testing.assert_close(cache.keys[0, rows[0]], cache.keys[0, rows[3]])
    keys, values = cache.gather(0, torch.tensor([2]), 2)
    torch.testing.assert_close(keys[0], cache.keys[0, rows[3] : rows[3] + 2])
    assert values.shape == (1, 2, cache.width)


def greedy(decoder: Decoder, prompts: list[list[int]], tokens: int, at_once: int) -> list[list[int]]:
    batcher = Batcher(decoder, 64)
    answers: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    waiting = [Request(i, p, tokens + i, ignore_eos=True) for i, p in enumerate(prompts)]
    with torch.inference_mode():
        while waiting or batcher.busy:
            while waiting and len(batcher.running) + len(batcher.waiting) < at_once:
                batcher.add(waiting.pop(0))
            for token in batcher.step():
                answers[token.id].append(token.token)
    return list(answers.values())


@pytest.mark.parametrize("name", ["deepseek", "mixtral", "qwen3"])
def test_greedy_answers_do_not_depend_on_company(name: str) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7, 9, 3]]
    alone = greedy(make(CONFIGS[name]), prompts, 9, 1)
    together = greedy(make(CONFIGS[name]), prompts, 9, 4)
    assert alone == together
    assert [len(answer) for answer in alone] == [9, 10, 11, 12]
    # And against the transcription, token by token.
    decoder = make(CONFIGS[name])
    sequence = list(prompts[1])
    for token in alone[1][:4]:
        assert plain_logits(decoder, sequence)[-1].argmax().item() == token
        sequence.append(token)


def test_every_family_of_examples_is_served() -> None:
    for folder in sorted(Path("examples/models").iterdir()):
        spec = spec_from(__import__("json").loads((folder / "config.json").read_text()))
        assert spec.moe_layers
        assert spec.head_dim * spec.heads == spec.hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    spec = spec_from(DEEPSEEK)
    logits = []
    for kind in (torch.float32, dtype):
        cpu = torch.device("cpu")
        cache = KvCache(spec.layers, 2, 32, spec.kv_heads * spec.head_dim, kind, cpu)

        class Same(Random):
            """The same numbers in both dtypes."""

            def get(self, name: str, shape: tuple[int, ...], kind: torch.dtype = kind) -> torch.Tensor:
                return super().get(name, shape).to(dtype).to(kind)

        experts = Experts(spec, kind, CpuDevice(), "torch", None)
        decoder = Decoder(spec, build(spec, Same(3, torch.float32, cpu)), cache, experts)
        with torch.inference_mode():
            decoder.prefill([Prompt([4, 5, 6, 7], 0), Prompt([9, 8], 1)])
            logits.append(decoder.decode(torch.tensor([1, 2]), torch.tensor([4, 2]), torch.tensor([0, 1]), 32))
    error = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 0 < error < 0.05
