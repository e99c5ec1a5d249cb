"""Where each model family keeps the dimensions of its MoE layers (a table; its reader is `layout`).

Sources: the architectures of SGLang 0.5.23's tuner (`get_model_config`) and model files, and the published config.json
of each family. Rows are literals only, so that the table of another revision can be compared without running it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Placement = Literal["all", "first-dense", "sparse-step", "interleave", "period", "frequency-list", "pattern"]


@dataclass(frozen=True)
class Family:
    """One architecture. Each `tuple` names fields in order of preference; a dot goes into a nested object.

    Args:
        architecture: as in `architectures` of config.json.
        experts: routed experts of the whole model.
        topk: experts per token.
        intermediate: intermediate size of one routed expert.
        placement: which layers are MoE layers.
        shared: how many shared experts the model has, where it says so.
        fused_shared: shared experts that the engine appends to the routed ones (E + 1) unless told otherwise.
        hidden: hidden size that the experts see.
        model_types: `model_type` values that mean this architecture where `architectures` is missing.
    """

    architecture: str
    experts: tuple[str, ...]
    topk: tuple[str, ...]
    intermediate: tuple[str, ...]
    placement: Placement = "all"
    shared: tuple[str, ...] = ()
    fused_shared: int = 0
    hidden: tuple[str, ...] = ("hidden_size",)
    model_types: tuple[str, ...] = ()


_PER_TOK = ("num_experts_per_tok",)
_MOE = ("moe_intermediate_size",)
_ROUTED = ("n_routed_experts",)
_NUM = ("num_experts", "num_local_experts")  # transformers 5 writes the latter for every family
_LOCAL = ("num_local_experts",)
_SHARED = ("n_shared_experts",)

FAMILIES: tuple[Family, ...] = (
    Family("MixtralForCausalLM", _LOCAL, _PER_TOK, ("intermediate_size",), model_types=("mixtral",)),
    Family(
        "DbrxForCausalLM",
        ("ffn_config.moe_num_experts",),
        ("ffn_config.moe_top_k",),
        ("ffn_config.ffn_hidden_size",),
        hidden=("d_model", "hidden_size"),
        model_types=("dbrx",),
    ),
    Family("JambaForCausalLM", _NUM, _PER_TOK, ("intermediate_size",), "period", model_types=("jamba",)),
    Family("Qwen2MoeForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen2_moe",)),
    Family("Qwen3MoeForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen3_moe",)),
    Family("Qwen3NextForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen3_next",)),
    Family("Qwen3VLMoeForConditionalGeneration", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen3_vl_moe",)),
    Family("Qwen3_5MoeForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step"),
    Family("Qwen3_5MoeForConditionalGeneration", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen3_5_moe",)),
    Family("Qwen4ExpForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step"),
    Family("Qwen4ExpForConditionalGeneration", _NUM, _PER_TOK, _MOE, "sparse-step", model_types=("qwen4_exp",)),
    Family("InternS2PreviewForConditionalGeneration", _NUM, _PER_TOK, _MOE, "sparse-step"),
    Family("MellumForCausalLM", _NUM, _PER_TOK, _MOE, "sparse-step"),
    Family("DeepseekForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("deepseek",)),
    Family("DeepseekV2ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("deepseek_v2",)),
    Family("DeepseekV3ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1, model_types=("deepseek_v3",)),
    Family("DeepseekV32ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1, model_types=("deepseek_v32",)),
    Family("DeepseekV4ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("deepseek_v4",)),
    Family("DeepseekOCRForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("deepseek_vl_v2",)),
    Family("DeepseekOCR2ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED),
    Family("UnlimitedOCRForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED),
    Family("DeepseekVL2ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED),
    Family("Glm4MoeForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1, model_types=("glm4_moe",)),
    Family(
        "Glm4MoeLiteForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1, model_types=("glm4_moe_lite",)
    ),
    Family("GlmMoeDsaForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1, model_types=("glm_moe_dsa",)),
    Family("Glm5NextForConditionalGeneration", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED),
    Family("KimiVLForConditionalGeneration", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("kimi_vl",)),
    # Around DeepseekV3 with 384 experts; SGLang fuses the shared expert of 256 only.
    Family(
        "KimiK25ForConditionalGeneration", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, model_types=("kimi_k25",)
    ),
    Family("MistralLarge3ForCausalLM", _ROUTED, _PER_TOK, _MOE, "first-dense", _SHARED, 1),
    Family(
        "Llama4ForConditionalGeneration",
        _LOCAL,
        _PER_TOK,
        ("intermediate_size",),
        "interleave",
        fused_shared=1,
        model_types=("llama4", "llama4_text"),
    ),
    Family("Grok1ForCausalLM", _LOCAL, _PER_TOK, _MOE, model_types=("grok-1",)),
    Family("Grok1ImgGen", _LOCAL, _PER_TOK, _MOE),
    Family("Grok1AForCausalLM", _LOCAL, _PER_TOK, _MOE),
    Family("BailingMoEForCausalLM", _NUM, _PER_TOK, _MOE, "first-dense", ("num_shared_experts",)),
    Family(
        "BailingMoeForCausalLM",
        _NUM,
        _PER_TOK,
        _MOE,
        "first-dense",
        ("num_shared_experts",),
        model_types=("bailing_moe",),
    ),
    Family(
        "BailingMoeV2ForCausalLM",
        _NUM,
        _PER_TOK,
        _MOE,
        "first-dense",
        ("num_shared_experts",),
        model_types=("bailing_moe_v2",),
    ),
    Family("BailingMoeV3ForCausalLM", _NUM, _PER_TOK, _MOE, "first-dense", ("num_shared_experts",)),
    Family(
        "HYV3ForCausalLM",
        _NUM,
        _PER_TOK,
        ("expert_hidden_dim", "moe_intermediate_size"),
        "first-dense",
        ("num_shared_experts",),
    ),
    Family(
        "NemotronHForCausalLM",
        _ROUTED,
        _PER_TOK,
        _MOE,
        "pattern",
        _SHARED,
        hidden=("moe_latent_size", "hidden_size"),
        model_types=("nemotron_h",),
    ),
    Family("Gemma4ForConditionalGeneration", _NUM, ("top_k_experts",), _MOE, model_types=("gemma4",)),
    Family("Lfm2MoeForCausalLM", _NUM, _PER_TOK, _MOE, "first-dense", model_types=("lfm2_moe",)),
    Family(
        "MiniMaxM3SparseForConditionalGeneration",
        _LOCAL,
        _PER_TOK,
        ("intermediate_size",),
        "frequency-list",
        _SHARED,
        1,
    ),
    Family(
        "GptOssForCausalLM",
        _LOCAL,
        ("num_experts_per_tok", "experts_per_token"),
        ("intermediate_size",),
        model_types=("gpt_oss",),
    ),
)
