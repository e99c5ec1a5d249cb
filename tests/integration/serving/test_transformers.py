"""Our decoder against Hugging Face's own models: the same tiny random checkpoint, the same logits.

Tolerance: float32 on both sides, absolute and relative 2e-4 (logits are of order 1).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.kvcache import KvCache
from serving.server.spec import read_spec
from serving.server.weights import Safetensors, build
from xkernels.device import CpuDevice

pytestmark = pytest.mark.slow  # importing the models takes most of it

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2}
CPU = torch.device("cpu")


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16,
        norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


class WithHead(torch.nn.Module):
    """DeepSeek-OCR-2's language model: MoE layers of DeepSeek-V2 with plain multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as module

        self.config = module.DeepseekOcr2TextConfig(
            **SIZES, **ROUTED, num_key_value_heads=4, mlp_layer_types=["dense", "sparse", "sparse"]
        )
        self.model = module.DeepseekOcr2TextModel(self.config)
        self.lm_head = torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"], bias=False)

    def forward(self, ids: torch.Tensor) -> object:
        hidden = self.model(ids, use_cache=False).last_hidden_state
        return type("Out", (), {"logits": self.lm_head(hidden)})()


MODELS = {
    "mixtral": (mixtral, ("block_sparse_moe", "w1", "w3", "w2"), {"architectures": ["MixtralForCausalLM"]}),
    "qwen3": (qwen3, ("mlp", "gate_proj", "up_proj", "down_proj"), {"architectures": ["Qwen3MoeForCausalLM"]}),
    "deepseek": (
        WithHead, ("mlp", "gate_proj", "up_proj", "down_proj"),
        {"architectures": ["DeepseekV2ForCausalLM"], "use_mla": False, "first_k_dense_replace": 1, **ROUTED},
    ),
}  # fmt: skip


def randomise(model: torch.nn.Module) -> None:
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=draw)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5)


def checkpoint(model: torch.nn.Module, names: tuple[str, str, str, str]) -> dict[str, torch.Tensor]:
    """The model's weights under the names of a published checkpoint (one matrix per expert)."""
    block, gate, up, down = names
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        head, found, tail = name.partition(".mlp.experts.")
        if found and tail == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip((gate, up), both.chunk(2), strict=True):
                    out[f"{head}.{block}.experts.{expert}.{part}.weight"] = half.clone()
        elif found:
            for expert, matrix in enumerate(tensor):
                out[f"{head}.{block}.experts.{expert}.{down}.weight"] = matrix.clone()
        else:
            out[name.replace(".mlp.gate.", f".{block}.gate.")] = tensor.clone()
    return out


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.nn.Module, Decoder]:
    make, names, extra = MODELS[request.param]
    torch.manual_seed(0)
    theirs = make().eval()
    randomise(theirs)
    save_file(checkpoint(theirs, names), tmp_path / "model.safetensors")
    config = {**json.loads(theirs.config.to_json_string()), **extra}
    config.pop("model_type", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    cache = KvCache(spec.layers, 4, 40, spec.kv_heads * spec.head_dim, torch.float32, CPU)
    weights = build(spec, Safetensors(tmp_path, torch.float32, CPU))
    ours = Decoder(spec, weights, cache, Experts(spec, torch.float32, CpuDevice(), "torch", None))
    return theirs, ours


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.abs().max() > 0.5, "logits that are all small would hide a fault"
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_logits_of_prefill_and_decode_alone_and_mixed(pair: tuple[torch.nn.Module, Decoder]) -> None:
    theirs, ours = pair
    draw = torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, 96, (length,), generator=draw).tolist() for length in (15, 9, 21)]
    prompts = (6, 8, 13)
    with torch.inference_mode():
        want = [theirs(torch.tensor([sequence])).logits[0].float() for sequence in sequences]
        alone = ours.prefill([Prompt(sequences[0][: prompts[0]], 3)])
        close(alone[0], want[0][prompts[0] - 1])
        mixed = ours.prefill([Prompt(s[:n], slot) for slot, (s, n) in enumerate(zip(sequences, prompts, strict=True))])
        for row, count in enumerate(prompts):
            close(mixed[row], want[row][count - 1])
        single = ours.decode(torch.tensor([sequences[0][6]]), torch.tensor([6]), torch.tensor([3]), 40)
        close(single[0], want[0][6])
        at = list(prompts)
        while any(n < len(s) for n, s in zip(at, sequences, strict=True)):
            rows = [i for i in range(3) if at[i] < len(sequences[i])]
            step = [[sequences[i][at[i]] for i in rows], [at[i] for i in rows], rows]
            logits = ours.decode(*(torch.tensor(values) for values in step), 40)
            for row, i in enumerate(rows):
                close(logits[row], want[i][at[i]])
                at[i] += 1
