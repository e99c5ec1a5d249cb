"""Model families: from config.json to the layout of MoE layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moegate.errors import UsageError
from moegate.families import FAMILIES, Layout, layout_of, load_layout
from moegate.families.source import families_in

OCR: dict[str, Any] = {
    "hidden_size": 1280,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 896,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
}


def model(architecture: str = "DeepseekOCR2ForCausalLM", **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **OCR, **fields}


@pytest.mark.parametrize("where", ["text_config", "language_config", "llm_config", ""])
@pytest.mark.parametrize("architecture", ["DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"])
def test_deepseek_ocr_as_published(where: str, architecture: str) -> None:
    config = {"architectures": [architecture], where: OCR} if where else model(architecture)
    layout = layout_of(config)
    assert (layout.experts, layout.topk, layout.intermediate, layout.hidden) == (64, 6, 896, 1280)
    assert (layout.layers, layout.dense_layers, len(layout.moe_layers)) == (12, 1, 11)
    assert (layout.shared_experts, layout.fused_shared, layout.nested) == (2, 0, where)
    assert layout.key("Intel(R) Arc(TM) Pro B60 Graphics").device_name == "Intel(R)_Arc(TM)_Pro_B60_Graphics"


def test_the_shipped_examples_are_read() -> None:
    root = Path(__file__).resolve().parents[3] / "examples" / "models"
    layout = load_layout(root / "deepseek-ocr-2")
    assert (layout.experts, layout.intermediate, layout.nested) == (64, 896, "language_config")
    for path in root.iterdir():
        assert load_layout(path).moe_layers


FULL = {
    "num_hidden_layers": 4, "hidden_size": 64, "d_model": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "top_k_experts": 2, "intermediate_size": 32, "moe_intermediate_size": 32,
    "expert_hidden_dim": 32, "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 32},
    "hybrid_override_pattern": "ME*E", "expert_layer_period": 2, "expert_layer_offset": 0,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_every_family_is_read_and_names_what_is_missing(family: Any) -> None:
    config = {"architectures": [family.architecture], **FULL}
    layout = layout_of(config)
    assert (layout.experts, layout.topk, layout.intermediate, layout.hidden) == (8, 2, 32, 64)
    assert 8 + family.fused_shared == layout.key("X", engine="sglang").E
    assert layout.key("X", engine="vllm").E == 8
    for names in (family.experts, family.topk, family.intermediate):
        poor = json.loads(json.dumps(config))
        for name in names:
            *parents, last = name.split(".")
            (poor[parents[0]] if parents else poor).pop(last, None)
        with pytest.raises(UsageError) as caught:
            layout_of(poor, file="m/config.json")
        assert caught.value.field == names[0]
        assert family.architecture in str(caught.value)


def test_which_layers_have_experts() -> None:
    def layers(architecture: str, **fields: Any) -> tuple[int, ...]:
        return layout_of({"architectures": [architecture], **FULL, **fields}).moe_layers

    assert layers("MixtralForCausalLM") == (0, 1, 2, 3)
    assert layers("DeepseekV3ForCausalLM", first_k_dense_replace=2) == (2, 3)
    assert layers("Qwen3MoeForCausalLM", decoder_sparse_step=2) == (1, 3)
    assert layers("Qwen3MoeForCausalLM", mlp_only_layers=[0, 3]) == (1, 2)
    assert layers("JambaForCausalLM", expert_layer_period=2, expert_layer_offset=1) == (1, 3)
    assert layers("Llama4ForConditionalGeneration", interleave_moe_layer_step=2) == (1, 3)
    assert layers("Llama4ForConditionalGeneration", moe_layers=[3, 1]) == (1, 3)
    assert layers("NemotronHForCausalLM") == (1, 3)
    blocks = ["mamba", "moe", "full_attention", "mlp"]
    assert layers("NemotronHForCausalLM", hybrid_override_pattern=None, layers_block_type=blocks) == (1,)
    assert layers("DeepseekV3ForCausalLM", first_k_dense_replace=1, moe_layer_freq=[1, 0, 1, 1]) == (2, 3)
    assert layers("DeepseekV3ForCausalLM", moe_layer_freq=3) == (0, 3)
    m3 = {"hybrid_override_pattern": None, "moe_layer_freq": [0, 0, 1, 1, 1]}
    assert layers("MiniMaxM3SparseForConditionalGeneration", **m3) == (2, 3)
    assert layers("Glm4MoeLiteForCausalLM", mlp_layer_types=["dense", "sparse", "sparse", "sparse"]) == (1, 2, 3)
    assert layers("DeepseekV4ForCausalLM", mlp_layer_types=["hash_moe", "moe", "moe", "moe"]) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("architecture", "fields", "field", "said"),
    [
        ("NemotronHForCausalLM", {"hybrid_override_pattern": None}, "hybrid_override_pattern", "is missing"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "ME*"}, "hybrid_override_pattern", "3 layers of 4"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MExE"}, "hybrid_override_pattern", "'x' at layer 2"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": [1, 1, 1, 1]}, "hybrid_override_pattern", "must be text"),
        ("NemotronHForCausalLM", {"layers_block_type": ["moe"] * 4}, "layers_block_type", "otherwise than hybrid_"),
        ("NemotronHForCausalLM", {"layers_block_type": "MEEE"}, "layers_block_type", "must be a list"),
        ("JambaForCausalLM", {"expert_layer_period": None}, "expert_layer_period", "is missing"),
        ("JambaForCausalLM", {"expert_layer_offset": None}, "expert_layer_offset", "is missing"),
        ("JambaForCausalLM", {"expert_layer_offset": 2}, "expert_layer_offset", "from 0 to 1"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": [0, 1]}, "moe_layer_freq", "2 layers of 4"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": [0, 1, 2, 1]}, "moe_layer_freq", "is 2 at layer 2"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": [0, 1, [1], 1]}, "moe_layer_freq", "is [1] at layer 2"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 0}, "moe_layer_freq", "from 1 to"),
        ("MiniMaxM3SparseForConditionalGeneration", {"moe_layer_freq": [1]}, "moe_layer_freq", "1 layers of 4"),
        ("MiniMaxM3SparseForConditionalGeneration", {"hybrid_override_pattern": None}, "moe_layer_freq", "is missing"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": "1,2"}, "mlp_only_layers", "'1,2'"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [1, "2"]}, "mlp_only_layers", "layer indices"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step", "from 1 to"),
        ("Llama4ForConditionalGeneration", {"moe_layers": [True]}, "moe_layers", "layer indices"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "1 layers of 4"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "first_k_dense_replace": 2},
         "mlp_layer_types", "otherwise than first_k_dense_replace"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_placed_are_refused(
    architecture: str, fields: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        layout_of({"architectures": [architecture], **FULL, **fields})
    assert caught.value.field == field
    assert said in str(caught.value)


def test_shared_expert_fusion_and_sharding() -> None:
    v3 = layout_of({"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256, "num_experts_per_tok": 8,
                    "moe_intermediate_size": 2048, "hidden_size": 7168, "num_hidden_layers": 61,
                    "first_k_dense_replace": 3, "n_shared_experts": 1,
                    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})  # fmt: skip
    key = v3.key("NVIDIA_H200", tp=8)
    assert (key.E, key.N, key.dtype, key.block_shape) == (257, 256, "fp8_w8a8", (128, 128))
    assert v3.key("NVIDIA_H200", tp=8, fuse_shared=False).E == 256
    # The shared expert is added after the experts are divided over ranks.
    assert (v3.key("NVIDIA_H200", tp=8, ep=8).E, v3.key("NVIDIA_H200", tp=8, ep=8).N) == (33, 2048)
    for tp, ep in ((6, 4), (3, 1), (16, 16), (0, 1)):
        with pytest.raises(UsageError):
            layout_of(model()).key("X", tp=tp, ep=ep) if (tp, ep) != (16, 16) else v3.key("X", tp=48, ep=48)


@pytest.mark.parametrize(
    ("block", "dtype", "shape", "channel"),
    [
        ({"quant_method": "fp8"}, "fp8_w8a8", None, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_w8a8", (128, 128), False),
        ({"quant_method": "mxfp8"}, "fp8_w8a8", (1, 32), False),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}, "mxfp4_w4a16", (1, 32), False),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4_w4a16", None, False),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8_w8a16", None, False),
        ({"quant_method": "w8a8_int8"}, "int8_w8a8", None, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4_w4a16", (1, 16), False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
         "fp8_w8a8", None, True),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block",
                                                    "block_structure": [128, 128]}}}}, "fp8_w8a8", (128, 128), False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
         "int4_w4a16", None, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                                        "input_activations": {"num_bits": 8}}}}, "int8_w8a8", None, True),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
         "fp8_w8a8", None, True),
    ],
)  # fmt: skip
def test_quantisation_blocks(block: dict[str, Any], dtype: str, shape: Any, channel: bool) -> None:
    key = layout_of(model(quantization_config=block)).key("X")
    assert (key.dtype, key.block_shape, key.per_channel_quant) == (dtype, shape, channel)


def test_int4_is_looked_up_by_its_packed_size_in_sglang_only() -> None:
    layout = layout_of(model(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64}))
    assert [layout.key("X", engine=e).N for e in ("moegate", "sglang", "vllm")] == [896, 448, 896]  # type: ignore[arg-type]
    assert layout.key("X", engine="vllm").block_shape == (0, 64)


def test_dtypes() -> None:
    assert layout_of(model()).key("X").dtype is None
    assert layout_of(model(torch_dtype="float32")).key("X").dtype == "float32"
    assert layout_of(model(torch_dtype="torch.float16")).dtype == "float16"
    quantised: Layout = layout_of(model(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}))
    assert quantised.key("X", dtype="bfloat16").dtype is None
    assert quantised.key("X", dtype="fp8_w8a8").block_shape == (128, 128)
    assert quantised.key("X", dtype="float32").block_shape is None


def test_conflicts_are_named_and_the_nested_section_counts() -> None:
    config = {**model(n_routed_experts=32), "language_config": OCR}
    layout = layout_of(config)
    assert layout.experts == 64
    assert layout.conflicts == ("n_routed_experts is 64 in language_config and 32 at the top: the former counts",)
    assert layout_of({**model(), "language_config": OCR}).conflicts == ()
    two = {"text_config": {**OCR, "n_routed_experts": 32}, "language_config": OCR, "vision_config": {"hidden_size": 5}}
    layout = layout_of({"architectures": ["DeepseekOCR2ForCausalLM"], **two})
    assert (layout.experts, layout.nested) == (32, "text_config")
    assert layout.conflicts == ("n_routed_experts is 32 in text_config and 64 in language_config: the former counts",)


def test_a_conflict_of_quantisations_is_named() -> None:
    config = {"architectures": ["DeepseekOCR2ForCausalLM"], "quantization_config": {"quant_method": "mxfp4"},
              "language_config": {**OCR, "quantization_config": {"quant_method": "fp8"}}}  # fmt: skip
    layout = layout_of(config)
    assert layout.quant.dtype == "fp8_w8a8"
    assert layout.conflicts == (
        "quantization_config.quant_method is 'fp8' in language_config and 'mxfp4' at the top: the former counts",
    )


@pytest.mark.parametrize("experts", [{"n_routed_experts": None}, {}])
def test_what_is_missing_in_the_text_model_is_named_there(experts: dict[str, Any]) -> None:
    text = {name: value for name, value in OCR.items() if name != "n_routed_experts"} | experts
    with pytest.raises(UsageError) as caught:
        layout_of({"architectures": ["DeepseekOCR2ForCausalLM"], "language_config": text})
    assert caught.value.field == "n_routed_experts"
    assert "to language_config" in str(caught.value)
    top = {"architectures": ["DeepseekOCR2ForCausalLM"], **OCR, "text_config": {"num_hidden_layers": 99}}
    assert layout_of(top).layers == 12


@pytest.mark.parametrize("architectures", [None, [], ["KimiVLForConditionalGeneration"]])
def test_the_outer_model_decides_on_fused_shared_experts(architectures: Any) -> None:
    text = {**OCR, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    kimi = layout_of({"architectures": architectures, "model_type": "kimi_vl", "text_config": text})
    assert (kimi.architecture, kimi.key("X", engine="sglang").E) == ("KimiVLForConditionalGeneration", 64)
    outer = {"architectures": architectures and ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    k25 = layout_of({**outer, "text_config": {**text, "n_routed_experts": 384}})
    assert (k25.architecture, k25.key("X", engine="sglang").E) == ("KimiK25ForConditionalGeneration", 384)
    ocr = layout_of({"architectures": None, "model_type": "deepseek_vl_v2", "language_config": text})
    assert (ocr.architecture, ocr.key("X", engine="sglang").E) == ("DeepseekOCRForCausalLM", 64)
    assert layout_of({"text_config": text}).key("X", engine="sglang").E == 65


@pytest.mark.parametrize(
    ("outer", "field"),
    [({"architectures": ["NewVLForCausalLM"]}, "architectures"), ({"model_type": "new"}, "model_type")],
)
def test_whether_an_unknown_outer_model_fuses_is_not_guessed(outer: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match="around DeepseekV3ForCausalLM") as caught:
        layout_of({**outer, "text_config": {**OCR, "architectures": ["DeepseekV3ForCausalLM"]}})
    assert caught.value.field == field
    assert layout_of({**outer, "text_config": {**OCR, "architectures": ["DeepseekV2ForCausalLM"]}}).experts == 64


def test_architectures_may_be_null_text_or_only_a_model_type() -> None:
    for value in (None, [], "absent"):
        config = {**OCR, "model_type": "deepseek_v2", "architectures": value}
        if value == "absent":
            del config["architectures"]
        assert layout_of(config).architecture == "DeepseekV2ForCausalLM"
    assert layout_of({**OCR, "architectures": "DeepseekV2ForCausalLM"}).architecture == "DeepseekV2ForCausalLM"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"first_k_dense_replace": 12}, "num_hidden_layers"),
        ({"n_routed_experts": "64"}, "n_routed_experts"),
        ({"n_routed_experts": -1}, "n_routed_experts"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"num_experts_per_tok": [6, 8]}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 896.0}, "moe_intermediate_size"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config.quant_method"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
         "quantization_config.weight_block_size"),
        ({"quantization_config": []}, "quantization_config"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_say_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    config = {**model(), **change}
    with pytest.raises(UsageError) as caught:
        layout_of(config, file="m/config.json")
    assert caught.value.field == field
    assert caught.value.file == "m/config.json"


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        load_layout(Path("x" * 300))


def test_a_file_is_read_strictly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model())[:-1] + ', "hidden_size": 7}')
    with pytest.raises(UsageError, match="twice"):
        load_layout(tmp_path)
    with pytest.raises(UsageError):
        load_layout(tmp_path / "absent")
    with pytest.raises(UsageError):
        layout_of([])


def test_the_table_reads_its_own_source() -> None:
    path = Path(__file__).resolve().parents[3] / "moegate" / "families" / "table.py"
    assert families_in(path.read_text(), "table.py") == FAMILIES
    for text in ("x = (", "", "FAMILIES = (print(1),)", "FAMILIES = (Family(open('x')),)"):
        with pytest.raises(UsageError):
            families_in(text, "t")
