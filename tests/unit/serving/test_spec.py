"""What a config.json may say, and what is refused instead of being served wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegate.errors import UsageError
from serving.server.spec import read_spec, spec_from

TINY = Path("examples/models/tiny-moe/config.json")
OCR2 = Path("examples/models/deepseek-ocr-2")


def config(**changes: object) -> dict:
    import json

    return {**json.loads(TINY.read_text()), **changes}


def test_ocr2_has_the_published_dimensions() -> None:
    spec = read_spec(OCR2)
    assert (spec.hidden, spec.experts, spec.topk, spec.expert_width, spec.layers) == (1280, 64, 6, 896, 12)
    assert spec.moe_layers == frozenset(range(1, 12))
    assert spec.shared_width == 2 * 896
    assert (spec.heads, spec.head_dim, spec.dtype, spec.eos) == (10, 128, "bfloat16", (1,))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_mla": True}, "kv_lora_rank"),
        ({"use_mla": None, "kv_lora_rank": 512}, "kv_lora_rank"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantization_config"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8}, "architectures"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"vocab_size": "512"}, "vocab_size"),
        ({"n_group": 3, "topk_method": "group_limited_greedy"}, "n_group"),
        ({"n_group": 8, "topk_group": 1, "topk_method": "group_limited_greedy"}, "n_group"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "greedy"}, "topk_method"),
        ({"head_dim": 31}, "head_dim"),
        ({"hidden_size": 130}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"eos_token_id": ""}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"topk_method": ["greedy"]}, "topk_method"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": [1e4]}}, "rope_parameters.rope_theta"),
    ],
)
def test_what_cannot_be_served_is_named(changes: dict, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec_from(config(**changes), TINY)
    assert caught.value.field == field
    assert str(TINY) in str(caught.value)


def test_greedy_choice_passes_groups_over() -> None:
    assert spec_from(config(n_group=4, topk_group=2)).groups == 1
    assert spec_from(config(n_group=4, topk_group=2, topk_method="group_limited_greedy")).groups == 4


def test_both_spellings_of_rope_and_of_eos() -> None:
    spec = spec_from(config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
                            eos_token_id=[1, 2]))  # fmt: skip
    assert spec.rope_theta == 5e5
    assert spec.eos == (1, 2)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        read_spec(tmp_path)
